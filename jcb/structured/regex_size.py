"""How long a regular expression is when its counted repetitions are written out."""

from __future__ import annotations

import re

_ITEM = re.compile(
    r"\\[pP]\{[^}]*\}|\\x\{[^}]*\}|\\u\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])+\]|(?P<open>\((?:\?[^:()]*:?)?)|(?P<close>\))"
    r"|\{(?P<low>\d+)(?P<more>,(?P<high>\d*))?\}|.",
    re.DOTALL,
)


MOST = 10**9
"""Where counting ends: a pattern could name a number longer than Python is willing to read or to write."""


def expanded_size(pattern: str) -> int:
    """Atoms in `pattern` with x{n} and x{m,n} as n times x, at most MOST; what cannot be read counts as it stands."""
    sums, last = [0], 0  # atoms of each open group, and of the last item, which a repetition multiplies
    for item in _ITEM.finditer(pattern):
        if item["open"] is not None:
            sums.append(0)
            last = 0
        elif item["close"] is not None and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif item["low"] is not None and last:
            count = max(_number(item["high"] or "0"), _number(item["low"]), 1)
            sums[-1] += last * (count - 1)
            last = min(last * count, MOST)
        else:
            sums[-1] += 1
            last = 1
    return min(sum(sums), MOST)


def _number(digits: str) -> int:
    return min(int(digits), MOST) if len(digits) < 4_000 else MOST
