"""How long a prompt's chunk may be where every step should take about as long, wherever in the prompt it stands.

The tokens of a chunk cost their matrix products and, each, the attention to all tokens before it. At the position
`half` the second is as much as the first, so q tokens from position p on cost q (1 + (p + q / 2) / half) in units of
one token's matrix products. Whole numbers only: the same everywhere, so that recordings replay.
"""

from __future__ import annotations

from math import isqrt


def cut(start: int, stop: int, most: int, half: int) -> tuple[int, int]:
    """Tokens of the next chunk of positions [start, stop), and what it takes of the budget, of which `most` may be
    used. half: 0 for chunks that do not shrink.
    """
    if not half:
        return min(stop - start, most), min(stop - start, most)
    q_len = min(stop - start, constant_cost(most, start, half))
    return q_len, equivalent(q_len, start, half)


def constant_cost(most: int, position: int, half: int) -> int:
    """Tokens from `position` on that cost what the first `most` tokens of a prompt cost, rounded down; at least 1."""
    begin = half + position
    return max(isqrt(begin * begin + most * (most + 2 * half)) - begin, 1)


def equivalent(q_len: int, position: int, half: int) -> int:
    """First tokens of a prompt that cost what `q_len` tokens from `position` on do, rounded down; at least q_len."""
    return max(isqrt(half * half + q_len * (q_len + 2 * (half + position))) - half, q_len)
