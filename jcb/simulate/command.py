"""What `jcb simulate` and `jcb replay` do, once their flags are values."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jcb.chips import Chip
from jcb.config import ModelConfig, ServeConfig
from jcb.recording import Recording
from jcb.recording.reader import is_recording
from jcb.simulate import report, workloads
from jcb.simulate.fit import Calibration, calibrate
from jcb.simulate.links import link_named
from jcb.simulate.recorded import RecordedWorkload, recorded_stats
from jcb.simulate.router import router_named
from jcb.simulate.setup import Engine, timed_engine
from jcb.simulate.shape import ModelShape
from jcb.simulate.simulation import PrefillPool, Simulation, Workload
from jcb.simulate.stats import RunStats
from jcb.simulate.traces import Trace
from jcb.simulate.what_if import simulate_recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """How many engines, and how requests reach them. prefill_replicas: a pool of their own for prompts; 0: none."""

    replicas: int = 1
    router: str = "least-loaded"
    prefill_replicas: int = 0
    link: str = "eth-200"


def workload_of(text: str, *, max_model_len: int, seed: int | None = None) -> Workload:
    """A recording, a trace file, or a description in words. ValueError says what is wrong with it."""
    path = Path(text).expanduser()
    if path.is_file():
        return (
            RecordedWorkload(Recording.open(path)) if is_recording(path) else Trace(path, max_model_len=max_model_len)
        )
    workload = workloads.parse(text)
    workload = dataclasses.replace(workload, max_model_len=workload.max_model_len or max_model_len)
    return workload if seed is None else dataclasses.replace(workload, seed=seed)


def simulation_of(
    engine: Engine, workload: Workload, fleet: Fleet, progress: Callable[[int, float], object] | None = None
) -> Simulation:
    """`engine` as often as `fleet` says, over `workload`."""
    pool = None
    if fleet.prefill_replicas:
        pool = PrefillPool(
            spec=engine.spec,
            replicas=fleet.prefill_replicas,
            link=link_named(fleet.link),
            kv_bytes=ModelShape.of(engine.model).kv_bytes(engine.config.cache.kv_dtype),
            router=router_named(fleet.router),
        )
    router = router_named(fleet.router)
    return Simulation(engine.spec, workload, replicas=fleet.replicas, router=router, prefill=pool, progress=progress)


def simulate(
    model: ModelConfig,
    chip: Chip,
    config: ServeConfig,
    workload: str,
    fleet: Fleet,
    *,
    calibration: Path | None = None,
    seed: int | None = None,
    as_json: bool = False,
) -> None:
    """Runs a workload and prints what came of it."""
    fitted = None if calibration is None else Calibration.load(calibration)
    engine = timed_engine(model, chip, config, fitted)
    traffic = workload_of(workload, max_model_len=engine.config.scheduler.max_model_len, seed=seed)
    begun = time.perf_counter()
    stats = simulation_of(engine, traffic, fleet, show_progress).run()
    took = time.perf_counter() - begun
    if as_json:
        print(json.dumps(stats.to_json() | {"simulated_in": took}, indent=1))
        return
    limits, devices = engine.spec.limits, config.mesh.tensor_parallel
    chips = f"{devices} x {chip.title}" if devices > 1 else chip.title
    print(
        f"{fleet.replicas + fleet.prefill_replicas} engine(s), each on {chips}: {engine.config.dtype}, "
        f"{limits.usable_pages:,} pages of {limits.page_size} tokens; simulated in {took:.1f} s"
    )
    print("\n".join(report.lines(stats)))


def show_progress(ended: int, now: float) -> None:
    """A line on stderr now and then."""
    print(f"{ended:,} requests ended, {report.seconds(now)} of virtual time", file=sys.stderr, flush=True)


def calibrate_to(recordings: Sequence[Path], output: Path, *, as_json: bool = False) -> None:
    """Fits step times to recordings and writes a calibration file."""
    calibration = calibrate([Recording.open(path) for path in recordings])
    calibration.save(output)
    if as_json:
        print(json.dumps(calibration.to_json(), indent=1))
        return
    fit = calibration.fit
    print(
        f"{fit.steps:,} steps of {calibration.model} on {calibration.platform}: median error {fit.median_error:.1%}, "
        f"p90 {fit.p90_error:.1%}, R² {fit.r_squared:.3f}; written to {output}"
    )


def replay(
    recording: Recording,
    settings: Mapping[str, object],
    *,
    calibration: Path | None = None,
    real: Callable[[], RunStats] | None = None,
    as_json: bool = False,
) -> None:
    """Prints a recorded run beside the same requests under `settings`, simulated and, with `real`, run."""
    fitted = calibrate(recording) if calibration is None else Calibration.load(calibration)
    runs = {"recorded": recorded_stats(recording), "simulated": simulate_recording(recording, calibration=fitted)}
    if settings:
        runs["changed"] = simulate_recording(recording, settings, calibration=fitted)
    if real is not None:
        runs["really changed" if settings else "run again"] = real()
    if as_json:
        print(
            json.dumps(
                {"settings": dict(settings), **{name: stats.to_json() for name, stats in runs.items()}}, indent=1
            )
        )
        return
    if settings:
        print("changed: " + ", ".join(f"{path}={value}" for path, value in settings.items()))
    print("\n".join(report.comparison(runs, "simulated" if settings else "recorded")))
    print(f"step times: median error {fitted.fit.median_error:.1%} over {fitted.fit.steps:,} steps")
