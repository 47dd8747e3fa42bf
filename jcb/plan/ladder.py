"""The k sizes that waste least: exact, by dynamic programming over the sizes that occur."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ladder:
    """Bucket sizes, ascending, and the sum over all occurrences of the bucket that each falls in."""

    sizes: tuple[int, ...]
    padded: int


def best_ladders(counts: Mapping[int, int], top: int, most: int, least: int = 2) -> list[Ladder]:
    """Entry i: the best ladder of at most i + 1 buckets that ends at `top`, for i < `most`.

    counts: how often each size from 1 to `top` occurs; sizes below `least` count as `least`. There is an optimum whose
    buckets are sizes that occur, so only those are tried. Raises ValueError for a size above `top` or `most` < 1.
    """
    if most < 1:
        raise ValueError(f"{most=} buckets: there must be at least one")
    if wrong := [size for size in counts if not 1 <= size <= top]:
        raise ValueError(f"size {wrong[0]} is outside 1 … {top}")
    merged: dict[int, int] = {max(top, least): 0}
    for size, count in counts.items():
        merged[max(size, least)] = merged.get(max(size, least), 0) + count
    sizes = np.array(sorted(merged), np.int64)
    upto = np.concatenate([[0], np.cumsum([merged[size] for size in sizes])])  # occurrences below each size
    # costs[j]: least padded sum of the sizes before the j-th with the buckets so far; choices: where the last began
    costs = np.concatenate([[0], sizes * upto[1:]])
    choices = [np.zeros(len(sizes) + 1, np.int64)]
    ladders = [Ladder((int(sizes[-1]),), int(costs[-1]))]
    for _ in range(1, min(most, len(sizes))):
        costs, begins = _one_more(costs, sizes, upto)
        choices.append(begins)
        ladders.append(Ladder(_walk_back(choices, sizes), int(costs[-1])))
    return ladders + [ladders[-1]] * (most - len(ladders))


def _one_more(costs: np.ndarray, sizes: np.ndarray, upto: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Costs with one more bucket allowed, and where the last bucket of each optimum begins."""
    better, begins = costs.copy(), np.zeros(len(costs), np.int64)
    for end in range(1, len(costs)):
        totals = costs[:end] + sizes[end - 1] * (upto[end] - upto[:end])
        begins[end] = totals.argmin()
        better[end] = totals[begins[end]]
    return better, begins


def _walk_back(choices: list[np.ndarray], sizes: np.ndarray) -> tuple[int, ...]:
    """The buckets of the optimum, from the last choice to the first."""
    found, end = [], len(sizes)
    for begins in reversed(choices):
        found.append(int(sizes[end - 1]))
        end = int(begins[end])
        if end == 0:
            break
    return tuple(reversed(found))
