"""Traffic to simulate: when requests come, how long they are, and what they share. Seeded, and made as they are needed.

A workload in words: a pattern of arrivals, then settings, for example
`poisson rate=4 requests=1000 prompt=lognormal(1155,1020) output=exponential(200) prefix=512 groups=4`.
"""

from __future__ import annotations

import dataclasses
import math
import random
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jcb.simulate import lengths
from jcb.simulate.job import Job
from jcb.simulate.lengths import Lengths

Pattern = Literal["poisson", "gamma", "ramp", "closed", "burst"]
PATTERNS: dict[str, str] = {
    "poisson": "independent arrivals, `rate` a second",
    "gamma": "as poisson but in bursts: `cv` is the standard deviation of the gaps over their mean",
    "ramp": "poisson whose rate grows evenly from `rate` to `rate_to` over all requests",
    "closed": "`users` clients, each sends its next request `think` seconds after its last answer",
    "burst": "all at once",
}


MAX_PREFIX = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Requests drawn from distributions, every one a function of the seed and its number alone.

    requests: how many in all, turns included. prompt: tokens of its own of each request, on top of a `prefix` that it
    shares with one in `groups`. turns: requests of a conversation; each holds all of those before it and their
    answers, and is sent `think` seconds after the last answer. slack: max_tokens as a multiple of the answer's length.
    """

    pattern: Pattern = "poisson"
    requests: int = 1000
    rate: float = 1.0
    rate_to: float = 0.0
    cv: float = 2.0
    users: int = 16
    think: float = 0.0
    prompt: str = "sharegpt"
    output: str = "sharegpt"
    prefix: int = 0
    groups: int = 1
    turns: int = 1
    slack: float = 1.0
    priorities: int = 1
    max_model_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "users", "groups", "turns", "priorities"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("rate", "cv"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not 1e-3 <= self.cv <= 1e3:
            raise ValueError(f"cv={self.cv} must be from 0.001 to 1,000")
        if self.prefix > MAX_PREFIX:
            raise ValueError(f"prefix={self.prefix} must be at most {MAX_PREFIX:,} tokens")
        for name in ("rate_to", "think", "prefix", "max_model_len"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.slack < 1:
            raise ValueError(f"slack={self.slack} must be at least 1")
        len(self._lengths)  # parses them, and so refuses bad ones here

    def jobs(self) -> Iterator[Job]:
        """First turns of all conversations; of a closed loop those that the users begin with."""
        first = math.ceil(self.requests / self.turns)
        if self.pattern == "closed":
            first = min(self.users, first)
        for session, at in zip(range(first), self._times(), strict=False):
            yield self._job(session, 0, at, None)

    def after(self, job: Job, now: float) -> Job | None:
        """The conversation's next turn, or the user's next conversation."""
        if job.turn + 1 < self.turns and self._number(job.session, job.turn + 1) < self.requests:
            return self._job(job.session, job.turn + 1, now + self.think, job)
        session = job.session + self.users
        if self.pattern == "closed" and self._number(session, 0) < self.requests:
            return self._job(session, 0, now + self.think, None)
        return None

    def _times(self) -> Iterator[float]:
        rng, now, sent = random.Random(f"{self.seed} times"), 0.0, 0
        while True:
            yield now
            sent += 1
            if self.pattern == "poisson":
                now += rng.expovariate(self.rate)
            elif self.pattern == "gamma":
                shape = 1 / self.cv**2
                now += rng.gammavariate(shape, 1 / (shape * self.rate))
            elif self.pattern == "ramp":
                share = sent * self.turns / self.requests
                now += rng.expovariate(self.rate + (self.rate_to - self.rate) * min(share, 1.0))

    def _number(self, session: int, turn: int) -> int:
        return session * self.turns + turn

    @cached_property
    def _lengths(self) -> tuple[Lengths, Lengths]:
        return lengths.parse(self.prompt, side="prompt"), lengths.parse(self.output, side="output")

    def _job(self, session: int, turn: int, at: float, before: Job | None) -> Job:
        number = self._number(session, turn)
        rng = random.Random(f"{self.seed} {number}")
        own, output = (draw(rng) for draw in self._lengths)
        group = rng.randrange(self.groups)
        shared = () if before is not None else _shared_tokens(group, self.prefix)
        past = () if before is None else (*before.prompt, *before.answer)
        if self.max_model_len:
            own = min(own, max(self.max_model_len - len(shared) - len(past) - 1, 1))
            output = min(output, max(self.max_model_len - len(shared) - len(past) - own, 1))
        begin = _own_tokens(number)
        mine = range(begin, begin + own)
        return Job(
            number=number,
            at=at,
            prompt=(*shared, *past, *mine) if shared or past else mine,
            answer=range(begin + own, begin + own + output),
            max_tokens=math.ceil(output * self.slack),
            session=session,
            turn=turn,
            priority=rng.randrange(self.priorities),
        )


def _own_tokens(number: int) -> int:
    """Where the tokens of a request begin: two requests may overlap, but no page of one equals a page of another."""
    return (1 << 24) + number * 7 % ((1 << 31) - (1 << 26))


def _shared_tokens(group: int, count: int) -> range:
    begin = group * 4099 % (1 << 23)
    return range(begin, begin + count)


def parse(text: str) -> Synthetic:
    """The workload that `text` describes. ValueError names the word at fault and what is known."""
    words = text.split()
    if not words or words[0] not in PATTERNS:
        raise ValueError(f"workload {text!r} must begin with one of {', '.join(PATTERNS)}, or be a file")
    hints = typing.get_type_hints(Synthetic)
    known = {field.name for field in dataclasses.fields(Synthetic)} - {"pattern"}
    values: dict[str, object] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"workload setting {word!r} must be KEY=VALUE with a key of {', '.join(sorted(known))}")
        try:
            values[name] = hints[name](value)
        except ValueError:
            raise ValueError(f"workload setting {word!r} must be a {hints[name].__name__}") from None
    return Synthetic(pattern=typing.cast(Pattern, words[0]), **values)  # ty: ignore[invalid-argument-type]
