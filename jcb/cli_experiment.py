"""`jcb experiment`: questions about batching, answered with a sentence, a picture and the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

Name = Literal["why-batch", "static-vs-continuous", "long-prompt", "memory", "knobs", "prefix", "policies", "published"]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Answer a question about batching: a sentence with the numbers, a picture (PNG) and JSON.

    Simulated with the real scheduler on a pretended chip, or with --real on this machine.
    """

    name: Annotated[Positional[Name], arg(help="which question", help_behavior_hint="")]
    sim: Annotated[str, arg(help="chip to simulate: h200, v6e, v6e-8, a100, cpu, ...", metavar="CHIP")] = "h200"
    real: Annotated[
        bool, FlagCreatePairsOff, arg(help="measure on this machine instead, at a size that fits it",
                                      help_behavior_hint="")
    ] = False  # fmt: skip
    model: Annotated[
        str,
        arg(
            help='a GGUF file, a folder, "default" or, simulated, "preset:llama-3.1-8b"',
            help_behavior_hint="(default: preset:llama-3.1-8b; with --real and for --sim cpu SmolLM2-135M)",
            metavar="PATH",
        ),
    ] = ""
    output: Annotated[Path, arg(help="folder for the JSON and the picture", metavar="DIR")] = Path("experiments")

    def run(self) -> int:
        """Prints the finding and where the picture is."""
        from functools import partial

        from jcb.bench.experiments import catalogue
        from jcb.plan.place import parse_chips

        if self.real:
            catalogue.run(self.name, self.output, lab=None, model=self.model or "default")
            return 0
        chip, devices = parse_chips(self.sim)
        model = self.model or ("preset:smollm2-135m" if chip.platform == "cpu" else "preset:llama-3.1-8b")
        lab = partial(catalogue.sim_lab, model, chip, devices)
        catalogue.run(self.name, self.output, lab=lab, model=model)
        return 0
