"""What the command and its compiling child process say to each other: one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from jcb.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile. config: a ServeConfig as TOML. only: texts of which a program's name must contain one."""

    topology: str
    config: str
    model: dict[str, Any]
    only: tuple[str, ...] = ()

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(**self.model)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the job was resolved; bytes are of each device. names: the programs to come, in order."""

    devices: int
    dtype: str
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    weights: int
    pages: int
    memory: int
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compiled program; bytes and operations are of each device.

    weights_beside: bytes of weights that lie in memory while it runs, where it does not take them.
    unknown_loops: loops counted once because their length is only known when they run. error: why it did not compile,
    or ""; all numbers are 0 then.
    """

    name: str
    seconds: float = 0.0
    argument_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    output_bytes: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    weights_beside: int = 0
    unknown_loops: int = 0
    floor_bytes: int = 0
    floor_seconds: float = 0.0
    error: str = ""

    @property
    def needed_bytes(self) -> int:
        """Memory that the device must have for this program to run."""
        own = self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes
        return own + self.weights_beside

    @property
    def over_floor(self) -> float:
        """The compiler's bytes over the floor's, 0 where there is no floor."""
        return self.bytes_accessed / self.floor_bytes if self.floor_bytes else 0.0


_KINDS: dict[str, type] = {"plan": Plan, "row": Row}


def encode(message: Plan | Row) -> str:
    """One line, marked so that a compiler's own output cannot be taken for it."""
    return "jcb-aot " + json.dumps({"kind": type(message).__name__.lower(), **dataclasses.asdict(message)})


def decode(line: str) -> Plan | Row | None:
    """The message that a line holds, None for anything else."""
    if not line.startswith("jcb-aot "):
        return None
    fields: dict[str, Any] = json.loads(line.removeprefix("jcb-aot "))
    kind = _KINDS[fields.pop("kind")]
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
