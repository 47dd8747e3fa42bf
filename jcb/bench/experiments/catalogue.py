"""Every experiment by name: how it is run, simulated and for real, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcb.bench.experiments import (
    knobs,
    long_prompt,
    memory,
    picture,
    policies,
    prefix,
    published,
    static_vs_continuous,
    why_batch,
)
from jcb.bench.experiments.real_lab import RealLab
from jcb.bench.experiments.sim_lab import SimLab
from jcb.bench.experiments.study import Study
from jcb.chips import Chip
from jcb.models.presets import PREFIX

_PAGE = 16  # tokens; on a machine whose pages are larger the pool only gets larger


@dataclass(frozen=True)
class Experiment:
    """module: has run, draw, Sizes, QUESTION, GRID and SIZE. real: sizes that fit a CPU; None: simulated only."""

    module: Any
    real: Any = None

    @property
    def question(self) -> str:
        return self.module.QUESTION

    def simulate(self, lab: SimLab, sizes: Any = None) -> Study:
        """On a pretended chip, by default at full size."""
        return self.module.run(lab, sizes or self.module.Sizes())

    def measure(self, model: str, sizes: Any = None) -> Study:
        """On this machine. ValueError where the experiment needs the simulator."""
        sizes = sizes or self.real
        if sizes is None:
            raise ValueError("this experiment runs in the simulator only: leave out --real")
        return self.module.run(RealLab.load(model, sizes.settings(_PAGE)), sizes)

    def paint(self, study: Study, path: Path) -> None:
        """The study's picture."""
        picture.paint(study, self.module.draw, path, grid=self.module.GRID, size=self.module.SIZE)


EXPERIMENTS: dict[str, Experiment] = {
    "why-batch": Experiment(
        why_batch,
        why_batch.Sizes(batches=(1, 2, 4, 8, 16, 32, 64), contexts=(64, 256), answer=24, budget=1024),
    ),
    "static-vs-continuous": Experiment(
        static_vs_continuous, static_vs_continuous.Sizes(slots=16, requests=64, prompt=32, mean=32)
    ),
    "long-prompt": Experiment(
        long_prompt,
        long_prompt.Sizes(
            users=16, context=128, prompt=4000, answer=240, budgets=(1024, 512, 256, 128, 64), pool=None
        ),
    ),
    "memory": Experiment(
        memory,
        memory.Sizes(pool=2048, longest=512, requests=48, slots=32, prompt="uniform(8,48)", output="uniform(8,56)"),
    ),
    "knobs": Experiment(knobs),
    "prefix": Experiment(
        prefix, prefix.Sizes(users=8, requests=32, system=256, groups=2, own=24, answer=16, turns=4, budget=256)
    ),
    "policies": Experiment(
        policies,
        policies.Sizes(requests=16, chat=16, document=256, shared=128, own=16, answer=16, slots=4, budget=128),
    ),
    "published": Experiment(published),
}  # fmt: skip


def sim_lab(model: str, chip: Chip, devices: int) -> SimLab:
    """The simulator for a model by name, path or preset."""
    from jcb.engine.model_shape import model_shape

    shape = model_shape(model)
    return SimLab(model.removeprefix(PREFIX) if model.startswith(PREFIX) else _name(model), shape, chip, devices)


def _name(model: str) -> str:
    return "SmolLM2-135M-Instruct" if model == "default" else Path(model).stem


def run(
    name: str, output: Path, *, lab: Callable[[], SimLab] | None, model: str, say: Callable[[str], object] = print
) -> Study:
    """Runs an experiment, writes its JSON and its picture into `output`, and says what was found. lab: None is real.

    "published" shows what --real left in `output` before.
    """
    experiment = EXPERIMENTS[name]
    sizes = published.Sizes(measured=str(output)) if name == "published" else None
    study = experiment.measure(model) if lab is None else experiment.simulate(lab(), sizes)
    path = study.write(output)
    experiment.paint(study, path.with_suffix(".png"))
    say(study.finding)
    say(f"wrote {path} and {path.with_suffix('.png')}")
    return study
