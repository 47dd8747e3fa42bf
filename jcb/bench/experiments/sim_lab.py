"""Experiments in the simulator: the production engine core and scheduler over a chip's step times."""

from __future__ import annotations

from dataclasses import dataclass

from jcb import config_file
from jcb.bench.experiments.lab import PATIENT, Run, Settings, Traced, Watch, note_turn
from jcb.chips import Chip
from jcb.config import MeshConfig, ModelConfig, ServeConfig
from jcb.simulate.links import link_named
from jcb.simulate.replica import Turn
from jcb.simulate.router import LeastLoaded
from jcb.simulate.setup import Engine, make_engine
from jcb.simulate.shape import ModelShape
from jcb.simulate.simulation import PrefillPool, Simulation, Workload


@dataclass(frozen=True)
class Pool:
    """A prefill pool beside the engine: its budget of tokens a step, and the link that pages travel over."""

    link: str
    budget: int


@dataclass
class SimLab:
    """The simulator: one engine on `devices` chips, or with `pool` a second one that computes prompts."""

    model: str
    shape: ModelConfig
    device: Chip
    devices: int = 1
    is_real: bool = False

    @property
    def title(self) -> str:
        chips = f"{self.devices} x {self.device.title}" if self.devices > 1 else self.device.title
        return f"{chips}, simulated"

    @property
    def chip(self) -> str:
        return f"{self.device.name}-{self.devices}" if self.devices > 1 else self.device.name

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.engine({}).spec.limits.page_size

    @property
    def kv_bytes(self) -> int:
        """Cache bytes of one token, on all chips together."""
        return ModelShape.of(self.shape).kv_bytes(self.device.dtype)

    def engine(self, settings: Settings) -> Engine:
        """One engine under `settings`."""
        config = ServeConfig(mesh=MeshConfig(tensor_parallel=self.devices))
        return make_engine(self.shape, self.device, config_file.override(config, {**PATIENT, **settings}))

    def run(
        self, workload: Workload, settings: Settings, watch: Watch | None = None, *, pool: Pool | None = None
    ) -> Run:
        run = Run()
        engine = self.engine(settings)

        def on_turn(turn: Turn) -> None:
            note_turn(run, turn.plan, turn.outputs, turn.ended)
            run.busy += turn.device_seconds
            if watch is not None and turn.replica == 0:
                watch(turn, simulation.replicas[0].core)

        prefill = None if pool is None else self._pool(pool, settings)
        simulation = Simulation(engine.spec, Traced(workload, run), prefill=prefill, on_turn=on_turn)
        simulation.run()
        return run

    def _pool(self, pool: Pool, settings: Settings) -> PrefillPool:
        budget = min(pool.budget, self.engine(settings).config.scheduler.max_num_batched_tokens)
        prefill = self.engine({**settings, "scheduler.max_num_batched_tokens": budget})
        return PrefillPool(
            spec=prefill.spec,
            replicas=1,
            link=link_named(pool.link),
            kv_bytes=self.kv_bytes,
            router=LeastLoaded(),
        )
