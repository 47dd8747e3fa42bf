"""Which replica gets a request: round robin, least loaded, prefix aware, by session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from jcb.simulate.job import Job

PREFIX_TOKENS = 64
"""A prefix is remembered in pieces of so many tokens."""

MAX_PIECES = 64
MAX_REMEMBERED = 1 << 17
MOST_IMBALANCE = 1.5
"""A replica with a known prefix is passed over when it has so many times the jobs of the least loaded one."""


class Loaded(Protocol):
    """What a router may know of a replica. load: requests it has not finished."""

    @property
    def load(self) -> int: ...


class Router(Protocol):
    """Chooses a replica's index for a job."""

    def choose(self, job: Job, replicas: Sequence[Loaded]) -> int: ...


class RoundRobin:
    """One after another, whatever they do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, job: Job, replicas: Sequence[Loaded]) -> int:
        del job
        chosen = self._next
        self._next = (chosen + 1) % len(replicas)
        return chosen


class LeastLoaded:
    """The one with the fewest unfinished requests; of equals the next in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, job: Job, replicas: Sequence[Loaded]) -> int:
        del job
        count, start = len(replicas), self._turn
        loads = [replica.load for replica in replicas]
        least = min(loads)
        chosen = next(i % count for i in range(start, start + count) if loads[i % count] == least)
        self._turn = (chosen + 1) % count
        return chosen


class BySession:
    """Every turn of a conversation to the same replica; a request without one goes round robin."""

    def __init__(self) -> None:
        self._others = RoundRobin()

    def choose(self, job: Job, replicas: Sequence[Loaded]) -> int:
        if job.session < 0:
            return self._others.choose(job, replicas)
        return (job.session * 0x9E3779B97F4A7C15 >> 20) % len(replicas)


class PrefixAware:
    """The replica that was last sent the longest prefix of this prompt, unless it has far more to do than others."""

    def __init__(self) -> None:
        self._where: OrderedDict[int, int] = OrderedDict()  # replica by hash of a prefix, oldest first
        self._others = LeastLoaded()

    def choose(self, job: Job, replicas: Sequence[Loaded]) -> int:
        keys = self._keys(job)
        known = next((self._where[key] for key in reversed(keys) if key in self._where), None)
        least = min(replica.load for replica in replicas)
        if known is None or replicas[known].load > MOST_IMBALANCE * least + 4:
            known = self._others.choose(job, replicas)
        for key in keys:
            self._where[key] = known
            self._where.move_to_end(key)
        while len(self._where) > MAX_REMEMBERED:
            self._where.popitem(last=False)
        return known

    @staticmethod
    def _keys(job: Job) -> list[int]:
        key, keys = hash(job.namespace), []
        for start in range(0, min(len(job.prompt), PREFIX_TOKENS * MAX_PIECES) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
            key = hash((key, tuple(job.prompt[start : start + PREFIX_TOKENS])))
            keys.append(key)
        return keys


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAware,
    "session": BySession,
}


def router_named(name: str) -> Router:
    """A new router. Raises ValueError that lists those known."""
    if name not in ROUTERS:
        raise ValueError(f"no router {name!r} is known, only {', '.join(ROUTERS)}")
    return ROUTERS[name]()
