"""What repetitions say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [statistics.median(values), min(values), max(values)]
