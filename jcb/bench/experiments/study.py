"""What an experiment found: numbers as JSON, a sentence made of them, and a picture drawn from nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Study:
    """One experiment's result.

    name: the experiment's; model, chip and place say what it ran on, workload what was asked; finding: sentences with
    the numbers; data: the figures, as JSON can hold them.
    """

    name: str
    question: str
    model: str
    chip: str
    place: str
    workload: str
    finding: str
    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "experiment": self.name,
            "question": self.question,
            "model": self.model,
            "chip": self.chip,
            "place": self.place,
            "workload": self.workload,
            "finding": self.finding,
            "data": self.data,
        }

    @staticmethod
    def of_json(found: dict[str, Any]) -> Study:
        """What `to_json` wrote."""
        fields = {"name": found["experiment"]} | {key: found[key] for key in found if key != "experiment"}
        return Study(**fields)

    def write(self, folder: Path) -> Path:
        """Writes NAME-CHIP.json there and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}-{self.chip}.json"
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path
