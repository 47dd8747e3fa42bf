"""Commands of the lab: simulate a fleet, replay a recorded run under other knobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from jcb.cli_options import EngineOptions, setting

_NONE = "(default: none)"
MAX_REPLICAS = 10_000
_WORKLOAD = (
    'a recording, a trace (CSV or JSONL), or words: poisson, gamma, ramp, closed or burst, then settings, as in '
    '"poisson rate=4 requests=1000 prompt=lognormal(1155,1020) output=exponential(200) prefix=512 groups=4 turns=3"'
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Simulate(EngineOptions):
    """Run traffic through the real scheduler on a pretended chip: latencies, throughput, what limits them."""

    model: Annotated[
        str | None,
        setting("model", 'a folder with a config.json, a GGUF file, or "preset:llama-3.1-8b"', metavar="PATH"),
    ] = None
    chip: Annotated[str, arg(help="cpu, a100, h100, h200:8, b200, v5e, v6e-8, v5p, tpu7x", metavar="CHIPS")] = "cpu"
    workload: Annotated[str, arg(help=_WORKLOAD, metavar="TEXT", help_behavior_hint="(default: poisson)")] = "poisson"
    replicas: Annotated[int, arg(help="engines, each on all the chips of --chip")] = 1
    router: Annotated[str, arg(help="round-robin, least-loaded, prefix or session")] = "least-loaded"
    prefill_replicas: Annotated[int, arg(help="engines that only compute prompts; the others then only decode")] = 0
    link: Annotated[
        str, arg(help="what KV pages travel over between them: nvlink4, pcie5, ici-v6e, ib-400, eth-200, ...")
    ] = "eth-200"
    calibration: Annotated[
        Path | None, arg(help="step times that --calibrate fitted", metavar="FILE", help_behavior_hint=_NONE)
    ] = None
    calibrate: Annotated[
        tuple[Path, ...],
        UseAppendAction,
        arg(help="fit step times to this recording instead of simulating", metavar="FILE", help_behavior_hint=""),
    ] = ()
    output: Annotated[Path, arg(help="file for the step times that --calibrate fits", metavar="FILE")] = Path(
        "calibration.json"
    )
    json: Annotated[bool, FlagCreatePairsOff, arg(help="print JSON instead of a table", help_behavior_hint="")] = False

    def run(self) -> int:
        """Prints the figures."""
        from jcb import config_file
        from jcb.engine.model_shape import model_shape
        from jcb.plan.place import parse_chips
        from jcb.simulate import command

        if self.calibrate:
            command.calibrate_to(self.calibrate, self.output, as_json=self.json)
            return 0
        for name in ("replicas", "prefill_replicas"):
            if getattr(self, name) > MAX_REPLICAS:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at most {MAX_REPLICAS:,}")
        config = self.serve_config()
        chip, devices = parse_chips(self.chip)
        if config.mesh.tensor_parallel == 1 and devices > 1:
            config = config_file.override(config, {"mesh.tensor_parallel": devices})
        command.simulate(
            model_shape(config.model),
            chip,
            config,
            self.workload,
            command.Fleet(
                replicas=self.replicas, router=self.router, prefill_replicas=self.prefill_replicas, link=self.link
            ),
            calibration=self.calibration,
            seed=self.seed,
            as_json=self.json,
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Run the requests of a recording again under other knobs and show the difference."""

    recording: Annotated[Positional[Path], arg(help="made by --record", metavar="FILE", help_behavior_hint="")]
    set: Annotated[
        tuple[str, ...],
        UseAppendAction,
        arg(help="one setting, as in --set max_num_seqs=8", metavar="KEY=VALUE", help_behavior_hint=""),
    ] = ()
    calibration: Annotated[
        Path | None,
        arg(help="fitted step times", metavar="FILE", help_behavior_hint="(default: fitted to the recording)"),
    ] = None
    check: Annotated[
        bool, FlagCreatePairsOff, arg(help="only see whether every plan comes again as it was", help_behavior_hint="")
    ] = False
    real: Annotated[
        bool, FlagCreatePairsOff, arg(help="also run it on this machine's device", help_behavior_hint="")
    ] = False
    model: Annotated[
        str, arg(help="model for --real", metavar="PATH", help_behavior_hint="(default: the one recorded)")
    ] = ""
    json: Annotated[bool, FlagCreatePairsOff, arg(help="print JSON instead of a table", help_behavior_hint="")] = False

    def run(self) -> int:
        """Prints the comparison; with --check status 1 when a plan differs."""
        from jcb import config_file
        from jcb.recording import Recording
        from jcb.simulate import command
        from jcb.simulate.replay import Replay as Exact

        recording = Recording.open(self.recording)
        if self.check:
            replayed = Exact(recording).run()
            print(f"{replayed.steps:,} turns and {replayed.ends:,} ends came again as they were")
            if replayed.difference is not None:
                print(f"then this did not: {replayed.difference}")
            return 1 if replayed.difference is not None else 0
        settings = config_file.parse_settings(self.set)
        real = None
        if self.real:
            from functools import partial

            from jcb.bench.real_run import rerun

            real = partial(rerun, recording, settings, model=self.model)
        command.replay(recording, settings, calibration=self.calibration, real=real, as_json=self.json)
        return 0
