"""Experiments on the engine of this machine."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jcb import config_file
from jcb.bench.experiments.lab import PATIENT, Run, Settings, Traced, Watch, note_turn
from jcb.config import ServeConfig
from jcb.engine.core import EngineCore
from jcb.metrics import StepTimes
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.job import Job
from jcb.simulate.replica import Turn
from jcb.simulate.simulation import Workload
from jcb.types import SequenceOutput, StepPlan

if TYPE_CHECKING:
    from jcb.engine.build import Engine


class RealLab:
    """A loaded engine, which nothing else steps meanwhile.

    Runs may differ in the scheduler's settings, the number of pages and the prefix cache, up to what it was loaded for.
    """

    is_real = True
    chip = "real"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model = engine.info.name
        self.title = f"{_machine(self._engine.platform)}, measured"

    @staticmethod
    def load(model: str, ceiling: Settings) -> RealLab:
        """An engine for `ceiling`, the largest settings that any run in it has."""
        from jcb.bench.real_run import load

        return RealLab(load(config_file.override(ServeConfig(model=model), {**PATIENT, **ceiling})))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._engine.config.cache.page_size

    def run(self, workload: Workload, settings: Settings, watch: Watch | None = None) -> Run:
        """Every job to its end, on an empty cache."""
        from jcb.bench.real_run import Runner

        engine, run = self._engine, Run()
        info, limits = engine.info, engine.info.limits
        assert limits is not None
        config = config_file.override(engine.config, settings)
        limits = dataclasses.replace(limits, num_pages=min(config.cache.num_pages, limits.num_pages))
        scheduler = Scheduler(config.scheduler, limits, enable_prefix_caching=config.cache.enable_prefix_caching)
        observer = _Observer(run, watch)
        core = EngineCore(scheduler, engine.executor, overlap=engine.config.engine.overlap, metrics=observer)
        observer.start(core)
        Runner(core, Traced(_Leaving(workload), run), info.vocab_size, limits.max_model_len).run()
        return run


class _Observer:
    """Hears of every turn from the core and passes it on as the simulator does."""

    def __init__(self, run: Run, watch: Watch | None) -> None:
        self._run = run
        self._watch = watch
        self._core: EngineCore | None = None
        self._begin = self._began = 0.0

    def start(self, core: EngineCore) -> None:
        self._core, self._begin, self._began = core, time.monotonic(), 0.0

    def record_step(
        self, plan: StepPlan, outputs: list[SequenceOutput], stats: dict[str, int], times: StepTimes
    ) -> None:
        now = time.monotonic() - self._begin
        note_turn(self._run, plan, outputs, now)
        self._run.busy += times.device or 0.0
        if self._watch is not None:
            assert self._core is not None
            turn = Turn(0, self._began, now, plan, None, times.device or 0.0, outputs, stats)
            self._watch(turn, self._core)
        self._began = now


@dataclass
class _Leaving:
    """A workload whose clients leave where an answer was to stop before its limit: a model does not stop to order."""

    workload: Workload

    def jobs(self) -> Iterator[Job]:
        return map(_leaving, self.workload.jobs())

    def after(self, job: Job, now: float) -> Job | None:
        following = self.workload.after(job, now)
        return None if following is None else _leaving(following)


def _leaving(job: Job) -> Job:
    if job.max_tokens <= job.output_tokens:
        return job
    begin = job.answer[0]
    answer = range(begin, begin + job.max_tokens)
    return dataclasses.replace(job, answer=answer, abort_after=job.output_tokens)


def _machine(platform: str) -> str:
    """What the pictures call this machine."""
    if platform != "cpu":
        import jax

        return jax.devices()[0].device_kind
    names = [line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'a CPU'}"


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
