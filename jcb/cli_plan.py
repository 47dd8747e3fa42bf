"""Commands that answer before anything is loaded: which programs to compile, what fits, what to expect."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jcb.cli_options import EngineOptions, setting

if TYPE_CHECKING:
    from jcb.chips import Chip
    from jcb.config import ModelConfig, ServeConfig
    from jcb.simulate.fit import Calibration

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

        for name, least, most in (("requests", 1, 10_000_000), ("concurrency", 0, 10_000_000), ("k", 1, 1000)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least {least} and at most {most:,}")
        _check_seconds(self.compile_seconds)
        buckets.run(
            self.source, self.file_config(), self.settings(), programs=self.k, row_buckets=self.row_buckets,
            compile_seconds=self.compile_seconds, requests=self.requests, concurrency=self.concurrency,
            seed=self.seed or 0, output=self.output,
        )  # fmt: skip
        return 0


@dataclass(frozen=True, kw_only=True)
class Plan(EngineOptions):
    """Say what a model needs and gives on a chip, before anything is loaded; or find settings that meet a goal."""

    model: Annotated[
        str | None,
        setting("model", 'a folder with a config.json, a GGUF file, or "preset:llama-3.1-8b"', metavar="PATH"),
    ] = None
    chip: Annotated[str, arg(help="cpu (this machine), h100, h200:8, v6e-8, v5e:2x2 and the like", metavar="CHIPS")] = (
        "cpu"
    )
    tp: Annotated[
        int | None,
        arg(help="chips that share the model", help_behavior_hint="(default: all named)", metavar="INT"),
    ] = None
    input_len: Annotated[int, arg(help="prompt tokens of the requests to plan for; 0: 1,024 or what fits")] = 0
    output_len: Annotated[int, arg(help="tokens of their answers; 0: 256 or what fits")] = 0
    compile_seconds: Annotated[
        float | None,
        arg(help="seconds to compile one program, as measured", metavar="FLOAT", help_behavior_hint="(default: 5)"),
    ] = None
    calibration: Annotated[
        Path | None,
        arg(help="step times that `jcb simulate --calibrate` fitted", metavar="FILE", help_behavior_hint=_NONE),
    ] = None
    goal: Annotated[
        str,
        arg(
            help="find settings for this, as in ttft=500ms,tpot=40ms; also itl, e2e",
            metavar="GOAL",
            help_behavior_hint=_NONE,
        ),
    ] = ""
    goal_percentile: Annotated[float, arg(help="per cent of requests that must meet it")] = 90.0
    request_rate: Annotated[float, arg(help="requests a second of the goal's workload")] = 1.0
    workload: Annotated[
        str,
        arg(
            help='as in "poisson rate=4 requests=500 prompt=lognormal(1155,1020) output=exponential(200)"',
            help_behavior_hint="(default: poisson, 200 requests of --input-len, exponential --output-len)",
        ),
    ] = ""
    output: Annotated[
        Path | None, arg(help="TOML file to write the found settings to", metavar="FILE", help_behavior_hint=_NONE)
    ] = None
    json: Annotated[bool, FlagCreatePairsOff, arg(help="print JSON instead of a table", help_behavior_hint="")] = False

    def run(self) -> int:
        """Prints the plan, or the search for a goal; status 1 when it cannot be met."""
        from jcb.engine.model_shape import model_shape
        from jcb.plan import table
        from jcb.plan.place import parse_chips, split_of
        from jcb.plan.planner import make_plan

        if self.tp is not None and self.tp < 1:
            raise ValueError(f"--tp {self.tp} must be at least 1")
        _check_seconds(self.compile_seconds)
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must not be negative")
        config = self.serve_config()
        chip, named = parse_chips(self.chip)
        devices = split_of(self.tp, config.mesh.tensor_parallel, named)
        model = model_shape(config.model)
        if self.goal:
            return self._search(config, model, chip, devices)
        if self.workload or self.output:
            raise ValueError("--workload and --output go with --goal")
        plan = make_plan(
            config, model, chip, devices=devices, replicas=max(named // devices, 1), input_len=self.input_len,
            output_len=self.output_len, fitted=self._fitted(),
        )  # fmt: skip
        if self.json:
            print(table.to_json(plan, self.compile_seconds))
        else:
            table.show(plan, self.compile_seconds)
        return 0

    def _fitted(self) -> Calibration | None:
        """The step times of --calibration."""
        from jcb.simulate.fit import Calibration

        return None if self.calibration is None else Calibration.load(self.calibration)

    def _search(self, config: ServeConfig, model: ModelConfig, chip: Chip, devices: int) -> int:
        """Search for the goal; prints what was found and writes the settings."""
        from jcb import config_file, terminal
        from jcb.models.presets import serve_command
        from jcb.plan import goal
        from jcb.plan.table import search_json
        from jcb.simulate import workloads

        default = f"poisson rate={self.request_rate} requests=200 prompt={self.input_len or 1024} "
        text = self.workload or default + f"output=exponential({self.output_len or 256})"
        wanted, workload = goal.Goal.parse(self.goal, self.goal_percentile), workloads.parse(text)
        longest = config.scheduler.max_model_len or model.max_position_embeddings
        if not workload.max_model_len:
            workload = dataclasses.replace(workload, max_model_len=longest)
        with terminal.load_progress() as progress:
            found = goal.search(config, model, chip, devices, wanted, workload, progress, self._fitted())
        if self.json:
            print(search_json(found))
        else:
            print(f"workload: {text}")
            print(*goal.lines(found), sep="\n")
        if self.output is not None:
            self.output.write_text(config_file.dump(found.config), encoding="utf-8")
            print(f"wrote {self.output}: {serve_command(self.output, config.model)}", file=sys.stderr)
        return 0 if found.best.is_met else 1


def _check_seconds(value: float | None) -> None:
    if value is not None and not 0 <= value < 1e9:
        raise ValueError(f"--compile-seconds {value} must be a number of seconds, 0 or more")
