"""What is asked of every peer: named sets of requests, the same token ids for all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcb.bench.serving.arrivals import Arrivals

_LOW_ID, _HIGH_ID = 1000, 40_000  # ordinary tokens of the default model
_MEAN, _SHORTEST, _LONGEST = 64, 8, 256


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Requests of one kind. prompt, output: tokens; None mixes lengths (16 to 512 in, evenly; 8 to 256 out,
    exponential with mean 64). rate: requests a second, Poisson; None sends all at once. http: through the server.
    """

    name: str
    requests: int
    prompt: int | None
    output: int | None
    rate: float | None = None
    http: bool = False

    @property
    def title(self) -> str:
        lengths = "mixed lengths" if self.prompt is None else f"{self.prompt} in / {self.output} out"
        where = "HTTP, " if self.http else ""
        sent = "" if self.rate is None else f" at {self.rate:g}/s"
        return f"{where}{lengths}, {self.requests} request{'s' if self.requests > 1 else ''}{sent}"

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return 512 + _LONGEST if self.prompt is None or self.output is None else self.prompt + self.output

    def jobs(self, seed: int = 0) -> list[dict[str, Any]]:
        """The requests as a runner takes them; the same for the same cell and seed."""
        rng = random.Random(f"{self.name} {seed}")
        inputs = [self.prompt or rng.randint(16, 512) for _ in range(self.requests)]
        outputs = [self.output or _exponential(rng) for _ in range(self.requests)]
        offsets = [0.0] * self.requests
        if self.rate is not None:
            offsets = Arrivals(rate=self.rate).offsets(self.requests, seed).tolist()
        return [
            {"prompt": [rng.randrange(_LOW_ID, _HIGH_ID) for _ in range(size)], "output": output, "at": at}
            for size, output, at in zip(inputs, outputs, offsets, strict=True)
        ]

    def warm_up(self) -> list[dict[str, Any]]:
        """The same requests, all at once, with answers of 4 tokens at most."""
        return [job | {"output": min(job["output"], 4), "at": 0.0} for job in self.jobs(seed=1)]


def _exponential(rng: random.Random) -> int:
    return min(max(round(rng.expovariate(1 / _MEAN)), _SHORTEST), _LONGEST)


def _fixed(prompt: int, output: int, requests: int, *, http: bool = False) -> Cell:
    name = f"{'http-' if http else ''}{prompt}-{output}-{requests}"
    return Cell(name=name, requests=requests, prompt=prompt, output=output, http=http)


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in [
        *[_fixed(128, 32, requests) for requests in (1, 8, 32, 64)],
        *[_fixed(512, 64, requests) for requests in (1, 8, 32, 64)],
        Cell(name="mix", requests=64, prompt=None, output=None, rate=4.0),
        _fixed(128, 32, 64, http=True),
        Cell(name="http-mix", requests=64, prompt=None, output=None, rate=1.0, http=True),
    ]
}

QUICK: dict[str, Cell] = {
    cell.name: cell
    for cell in [
        _fixed(32, 8, 1),
        _fixed(32, 8, 8),
        Cell(name="mix", requests=6, prompt=None, output=None, rate=4.0),
        _fixed(32, 8, 8, http=True),
    ]
}
"""To see that everything runs; the figures mean nothing."""


def chosen(cells: dict[str, Cell], names: Sequence[str], rate: float | None) -> list[Cell]:
    """The cells of these names, all of them for none; a rate replaces theirs. ValueError for other names."""
    for name in names:
        if name not in cells:
            raise ValueError(f"--cells {name!r} is not one of {', '.join(cells)}")
    found = [cells[name] for name in names or cells]
    if rate is None:
        return found
    return [cell if cell.rate is None else dataclasses.replace(cell, rate=rate) for cell in found]
