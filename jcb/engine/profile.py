"""JAX's profiler, for who may not import JAX."""

from __future__ import annotations

import jax


class DeviceProfiler:
    """Records what host and device do; TensorBoard and Perfetto read the result."""

    def start(self, folder: str) -> None:
        """Begins; what is recorded goes below `folder`."""
        jax.profiler.start_trace(folder)

    def stop(self) -> None:
        """Ends, and writes."""
        jax.profiler.stop_trace()
