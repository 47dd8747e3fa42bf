"""What is known of each chip, as data, and the names of topologies.

A device is what JAX calls one: a chip, but one of the two cores of a tpu7x chip. Sources: bandwidth and peak of TPUs as
`pltpu.get_tpu_info` and Google's system pages state them, memory as the TPU compiler itself allots it; NVIDIA's data
sheets and XLA's device specifications for GPUs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device. memory: bytes a program can use; bandwidth: bytes/s of it; flops: peak of bfloat16 a second.

    dims: numbers that its topologies have ("2x2" has two; 0 for GPUs, which count devices). cores: devices a chip.
    target: fields of XLA's description of a GPU that differ from those in `GPU_TARGET`.
    """

    name: str
    title: str
    platform: str
    memory: int
    bandwidth: float
    flops: float
    dims: int = 0
    cores: int = 1
    accelerator_type: str = ""
    target: dict[str, Any] = field(default_factory=dict, hash=False)


GPU_TARGET: dict[str, Any] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "threads_per_core_limit": 2048,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "device_vendor": "NVIDIA Corporation",
    "device_address_bits": 64,
}
"""What Hopper and Blackwell data-centre GPUs have in common, in the words of XLA's GpuDeviceInfoProto."""

_HOPPER = {"capability": (9, 0), "core_count": 132, "l2_cache_size": 52_428_800, "clock_rate_ghz": 1.98}
_BLACKWELL = {"capability": (10, 0), "core_count": 148, "l2_cache_size": 132_644_864, "clock_rate_ghz": 1.965}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(name="v5e", title="TPU v5e", platform="tpu", memory=int(15.75 * _GIB), bandwidth=0.82e12, flops=197e12,
             dims=2, accelerator_type="v5litepod-4"),
        Chip(name="v6e", title="TPU v6e", platform="tpu", memory=int(31.24 * _GIB), bandwidth=1.64e12, flops=918e12,
             dims=2, accelerator_type="v6e-4"),
        Chip(name="v5p", title="TPU v5p", platform="tpu", memory=int(95.73 * _GIB), bandwidth=2.46e12, flops=459e12,
             dims=3, accelerator_type="v5p-8"),
        Chip(name="tpu7x", title="TPU v7x (one core)", platform="tpu", memory=int(94.74 * _GIB), bandwidth=3.7e12,
             flops=1155e12, dims=3, cores=2, accelerator_type="tpu7x-8"),
        Chip(name="h100", title="NVIDIA H100 80GB HBM3", platform="gpu", memory=84_942_979_072,
             bandwidth=3.35e12, flops=989e12, target=_HOPPER),
        Chip(name="h200", title="NVIDIA H200 141GB HBM3e", platform="gpu", memory=151_397_597_184,
             bandwidth=4.8e12, flops=989e12, target=_HOPPER),
        Chip(name="b200", title="NVIDIA B200", platform="gpu", memory=191_514_411_008,
             bandwidth=7.67e12, flops=2250e12, target=_BLACKWELL),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """Some chips, wired together. grid: chips along each dimension; for GPUs their number."""

    chip: Chip
    grid: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.grid) * self.chip.cores

    @property
    def name(self) -> str:
        """The name that libtpu knows, such as "v5e:2x2"; for GPUs "h200:1"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"


def parse_topology(text: str) -> Topology:
    """The topology that `text` names: "v5e:2x2", "v5p:2x2x1", "h200", "h200:8"; a chip alone is one of it.

    Raises ValueError that says what is known.
    """
    name, colon, rest = text.strip().lower().partition(":")
    if name not in CHIPS:
        raise ValueError(f"topology {text!r}: no chip {name!r} is known, only {', '.join(CHIPS)}")
    chip = CHIPS[name]
    dims = chip.dims or 1
    if not colon:
        return Topology(chip, (1,) * dims)
    example = f"{name}:" + ("8" if not chip.dims else "x".join("22" + "1" * (dims - 2)))
    if not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", rest) or rest.count("x") + 1 != dims:
        raise ValueError(f"topology {text!r} must be a chip and its grid, for example {example}")
    return Topology(chip, tuple(int(size) for size in rest.split("x")))


def gpu_target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto in text form: all that its GPU compiler asks of a device."""
    major, minor = chip.target["capability"]
    info = GPU_TARGET | {key: value for key, value in chip.target.items() if key != "capability"}
    info |= {"name": chip.title, "memory_bandwidth": int(chip.bandwidth), "device_memory_size": chip.memory}
    lines = [f'  {key}: "{value}"' if isinstance(value, str) else f"  {key}: {value}" for key, value in info.items()]
    lines.append(
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}"
    )
    body = "\n".join(lines)
    return (
        f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\n'
        f'dnn_version_info {{ major: 9 minor: 10 patch: 0 }}\ndevice_description_str: "{chip.title}"\n'
    )
