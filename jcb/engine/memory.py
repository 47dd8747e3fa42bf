"""Memory, planned before it is taken: weights, the hungriest program's temporaries, and pages within a budget.

Host half: the server and `jcb plan` count with the very same functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_GIB = 1 << 30
_DEVICE_SHARE = 0.9  # the rest is the driver's and the compiler's, or the machine's own
RESERVED_FOR_TEMPORARIES = _GIB  # while the programs' own figures are not known yet
_CPU_PAGE_BYTES = 2 * _GIB  # a laptop has other things to do
_CPU_SHARE = 0.5


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device."""

    weights: int
    pages: int
    temporaries: int
    budget: int

    def check(self) -> None:
        """Raises ValueError with all the numbers when the plan does not fit."""
        needed = self.weights + self.pages + self.temporaries
        if needed > self.budget:
            raise ValueError(
                f"the plan needs {needed / _GIB:.2f} GiB (weights {self.weights / _GIB:.2f}, pages "
                f"{self.pages / _GIB:.2f}, temporaries {self.temporaries / _GIB:.2f}) but the device has "
                f"{self.budget / _GIB:.2f} GiB for it; lower --kv-cache-memory, --max-num-seqs or "
                "--max-num-batched-tokens"
            )


@dataclass(frozen=True)
class Device:
    """What planning needs to know of each device. platform: "cpu", "gpu" or "tpu"; memory: bytes of it."""

    platform: str
    memory: int

    @property
    def budget(self) -> int:
        """Bytes that weights, temporaries and pages may take together."""
        return int(self.memory * _DEVICE_SHARE)


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pages_for_budget(device: Device, memory_gib: float, page_bytes: int, weight_bytes: int) -> int:
    """Pages of `page_bytes` (all layers) that fit `memory_gib`, or the memory left beside the weights when it is 0.

    All of one device. Raises ValueError when not even two fit (page 0 is a dummy).
    """
    if memory_gib:
        available = int(memory_gib * _GIB)
    else:
        available = device.budget - weight_bytes - RESERVED_FOR_TEMPORARIES
        if device.platform == "cpu":
            available = min(int(available * _CPU_SHARE), _CPU_PAGE_BYTES)
    pages = available // page_bytes
    if pages < 2:
        raise ValueError(
            f"{max(available, 0):,} bytes hold {max(pages, 0)} pages of {page_bytes:,} (weights take {weight_bytes:,} "
            f"of the device's {device.memory:,}); give more memory to the cache, or split the model over more devices"
        )
    return pages
