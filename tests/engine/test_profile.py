"""The device's profiler."""

import jax.numpy as jnp

from jcb.engine.profile import DeviceProfiler


def test_a_profile_is_written_below_its_folder(tmp_path):
    profiler = DeviceProfiler()
    profiler.start(str(tmp_path))
    jnp.arange(8).sum().block_until_ready()
    profiler.stop()
    assert any(path.is_file() for path in tmp_path.rglob("*"))
