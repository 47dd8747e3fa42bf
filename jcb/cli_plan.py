"""Commands that answer before anything is loaded: which programs to compile, what fits, what to expect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jcb.cli_options import EngineOptions

_NONE = "(default: none)"


@dataclass(frozen=True, kw_only=True)
class Buckets(EngineOptions):
    """Choose the step programs that waste least on a recorded run, or on requests of given lengths."""

    source: Annotated[
        Positional[Path],
        arg(
            help='a recording, or lines like {"prompt_tokens": 100, "output_tokens": 20, "count": 3}',
            metavar="FILE",
            help_behavior_hint="",
        ),
    ]
    k: Annotated[int, arg(help="step programs to compile, decode steps and others together")] = 8
    row_buckets: Annotated[int, arg(help="sizes of rows of steps with prompts; each multiplies")] = 1
    compile_seconds: Annotated[
        float | None,
        arg(help="seconds to compile one program, as measured", metavar="FLOAT", help_behavior_hint="(default: 5)"),
    ] = None
    requests: Annotated[int, arg(help="requests to serve in simulation, for a file of lengths")] = 2000
    concurrency: Annotated[int, arg(help="clients in that simulation; 0 is max_num_seqs")] = 0
    output: Annotated[
        Path | None, arg(help="TOML file to write the configuration to", metavar="FILE", help_behavior_hint=_NONE)
    ] = None

    def run(self) -> int:
        """Prints the buckets and what they change."""
        from jcb.plan import buckets

        for name, least in (("requests", 1), ("concurrency", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least {least}")
        buckets.run(
            self.source, self.file_config(), self.settings(), programs=self.k, row_buckets=self.row_buckets,
            compile_seconds=self.compile_seconds, requests=self.requests, concurrency=self.concurrency,
            seed=self.seed or 0, output=self.output,
        )  # fmt: skip
        return 0
