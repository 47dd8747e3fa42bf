"""Tile sizes as data: `tuned.json` in an op's folder says what was fastest for a kind of device and a class of shapes.

`jcb bench kernels --tune` measures and writes the file; where it says nothing, a backend's own heuristics hold.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from pallas_kernels.layout import KVLayout

Phase = Literal["decode", "chunk"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ShapeClass:
    """Shapes that share tile sizes. group: query heads a KV head. dtype: of the queries."""

    phase: Phase
    dtype: str
    kv_dtype: str
    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @staticmethod
    def of(layout: KVLayout, num_heads: int, dtype: str, phase: Phase) -> ShapeClass:
        """The class of a call with `num_heads` query heads of `dtype`."""
        return ShapeClass(
            phase=phase,
            dtype=dtype,
            kv_dtype=layout.dtype,
            kv_heads=layout.kv_heads,
            group=num_heads // layout.kv_heads,
            head_dim=layout.head_dim,
            page_size=layout.page_size,
        )


@dataclass(frozen=True)
class Entry:
    """One measured choice: the fastest `blocks` and what the untuned ones took, in microseconds a call."""

    device: str
    implementation: str
    shape: ShapeClass
    blocks: dict[str, int]
    microseconds: float
    untuned_microseconds: float
    measured: str


def device_kind(platform: str) -> str:
    """The device a program is being made for: what the current mesh names (real or abstract), else the one at hand."""
    named = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if named is not None and named.platform == platform:
        return str(named.device_kind)
    try:
        return jax.devices(platform)[0].device_kind
    except RuntimeError:
        return f"no {platform}"


def tuned_blocks(op: str, implementation: str, platform: str, shape: ShapeClass) -> dict[str, int] | None:
    """The tile sizes of tuned.json for the device at hand, or None."""
    device = device_kind(platform)
    for entry in load(op):
        if (entry.device, entry.implementation, entry.shape) == (device, implementation, shape):
            return entry.blocks
    return None


@functools.cache
def load(op: str) -> tuple[Entry, ...]:
    """Every entry of an op's tuned.json; none when there is no such file."""
    path = FOLDER / op / "tuned.json"
    if not path.exists():
        return ()
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Entry(shape=ShapeClass(**entry.pop("shape")), **entry) for entry in entries)


def dump(entries: tuple[Entry, ...]) -> str:
    """The text of a tuned.json, one entry a line, sorted."""
    lines = sorted(json.dumps(dataclasses.asdict(entry)) for entry in entries)
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def merge(old: tuple[Entry, ...], new: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """`old` with the entries of the same device, implementation and shape replaced by `new`."""
    key = lambda entry: (entry.device, entry.implementation, entry.shape)  # noqa: E731
    return tuple({**{key(entry): entry for entry in old}, **{key(entry): entry for entry in new}}.values())
