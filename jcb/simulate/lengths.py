"""How long prompts and answers are: distributions, those of a recording, and those published of real traffic."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from jcb.recording import Recording
from jcb.simulate.recorded import lengths_of, requests_of

Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Lengths:
    """Tokens drawn from a distribution, cut to [low, high]. text: how it was written."""

    text: str
    draw: Draw
    low: int = 1
    high: int = 1 << 30

    def __call__(self, rng: random.Random) -> int:
        return min(max(round(self.draw(rng)), self.low), self.high)


@dataclass(frozen=True)
class Traffic:
    """Published lengths of a data set: (mean, median) tokens, median 0 where only the mean is known."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    source: str


TRAFFIC: dict[str, Traffic] = {
    "sharegpt": Traffic((161.31, 0), (337.99, 0), "means of ShareGPT in the PagedAttention paper, arXiv 2309.06180"),
    "alpaca": Traffic((19.31, 0), (58.45, 0), "means of Alpaca in the PagedAttention paper, arXiv 2309.06180"),
    "azure-conversation": Traffic(
        (1155, 1020), (211, 129), "Azure LLM inference trace 2023, conversation: medians in Splitwise, arXiv 2311.18677"
    ),
    "azure-code": Traffic(
        (2048, 1500), (28, 13), "Azure LLM inference trace 2023, code: medians in Splitwise, arXiv 2311.18677"
    ),
}
"""Data sets whose lengths are drawn from a log-normal of their mean and median, or an exponential of their mean."""


def constant(value: float) -> Draw:
    """Always `value`."""
    return lambda rng: value


def uniform(low: float, high: float) -> Draw:
    """Equally likely from `low` to `high`."""
    return lambda rng: rng.uniform(low, high)


def exponential(mean: float) -> Draw:
    """Memoryless, as answers roughly are."""
    return lambda rng: rng.expovariate(1 / mean)


def lognormal(mean: float, median: float) -> Draw:
    """Skewed as prompts are. ValueError unless mean ≥ median > 0."""
    if not mean >= median > 0:
        raise ValueError(f"a log-normal has {mean=} at least {median=}, and both above 0")
    sigma = math.sqrt(2 * math.log(mean / median))
    return lambda rng: rng.lognormvariate(math.log(median), sigma)


def recorded(path: str, side: str) -> Draw:
    """As often as in a recording. ValueError when it cannot be read or holds no request that ended well."""
    pairs = lengths_of(requests_of(Recording.open(path)))
    if not pairs:
        raise ValueError(f"{path} holds no request that ended well")
    values = [prompt if side == "prompt" else output for prompt, output in pairs]
    return lambda rng: rng.choice(values)


_KINDS: dict[str, tuple[Callable[..., Draw], tuple[str, ...]]] = {
    "constant": (constant, ("tokens",)),
    "uniform": (uniform, ("low", "high")),
    "exponential": (exponential, ("mean",)),
    "lognormal": (lognormal, ("mean", "median")),
}

GRAMMAR = (
    "a number, constant(N), uniform(LOW,HIGH), exponential(MEAN), lognormal(MEAN,MEDIAN), a recording's file (.jsonl), "
    f"or a data set: {', '.join(TRAFFIC)}"
)


def parse(text: str, *, side: str = "prompt", high: int = 1 << 30) -> Lengths:
    """Lengths as `text` writes them. side: "prompt" or "output", for a data set's name. ValueError says what fits."""
    text = text.strip()
    if text in TRAFFIC:
        mean, median = getattr(TRAFFIC[text], side)
        return Lengths(text, lognormal(mean, median) if median else exponential(mean), high=high)
    if text.endswith(".jsonl"):
        return Lengths(text, recorded(text, side), high=high)
    match = re.fullmatch(r"(?:([a-z]+)\(([^()]*)\)|([0-9.]+))", text)
    if match is None or (match[1] and match[1] not in _KINDS):
        raise ValueError(f"lengths {text!r} must be {GRAMMAR}")
    make, names = _KINDS[match[1] or "constant"]
    try:
        values = [float(part) for part in (match[2] if match[1] else match[3]).split(",")]
    except ValueError:
        values = []
    if len(values) != len(names) or not all(0 < value < math.inf for value in values):
        raise ValueError(f"lengths {text!r}: {match[1] or 'constant'} takes {', '.join(names)}, each above 0")
    return Lengths(text, make(*values), high=high)
