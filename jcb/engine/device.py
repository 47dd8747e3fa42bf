"""The device of this process, as planning sees it."""

from __future__ import annotations

import jax

from jcb.engine.memory import Device, physical_memory


def local_device() -> Device:
    """The first device of this process."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return Device(jax.default_backend(), (stats or {}).get("bytes_limit") or physical_memory())
