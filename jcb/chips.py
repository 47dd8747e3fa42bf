"""What is known of each chip, as data, and the names of topologies.

Host half. A device is what JAX calls one: a chip, but one of the two cores of a tpu7x chip. Each figure's source is in
the entry's `source`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device. memory: bytes a program can use; bandwidth: bytes/s of it; flops: peak of `dtype` a second.

    dims: numbers that its topologies have ("2x2" has two; 0 for GPUs, which count devices). cores: devices a chip.
    dtype: what a model computes in by default. link: name in `jcb.simulate.links` of what joins it to its like; "" for
    none. target: fields of XLA's description of a GPU that differ from those in `jcb.aot.gpu_target`.
    """

    name: str
    title: str
    platform: str
    memory: int
    bandwidth: float
    flops: float
    source: str
    dtype: str = "bfloat16"
    link: str = ""
    dims: int = 0
    cores: int = 1
    accelerator_type: str = ""
    target: dict[str, Any] = field(default_factory=dict, hash=False)


_AMPERE = {"capability": (8, 0), "core_count": 108, "l2_cache_size": 41_943_040, "clock_rate_ghz": 1.41}
_HOPPER = {"capability": (9, 0), "core_count": 132, "l2_cache_size": 52_428_800, "clock_rate_ghz": 1.98}
_BLACKWELL = {"capability": (10, 0), "core_count": 148, "l2_cache_size": 132_644_864, "clock_rate_ghz": 1.965}

_TPU = "bandwidth and peak: pltpu.get_tpu_info and Google's system pages; memory: what the TPU compiler allots"
_GPU = "NVIDIA's data sheet; memory: XLA's device specification"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(name="v5e", title="TPU v5e", platform="tpu", memory=int(15.75 * _GIB), bandwidth=0.82e12, flops=197e12,
             dims=2, accelerator_type="v5litepod-4", link="ici-v5e", source=_TPU),
        Chip(name="v6e", title="TPU v6e", platform="tpu", memory=int(31.24 * _GIB), bandwidth=1.64e12, flops=918e12,
             dims=2, accelerator_type="v6e-4", link="ici-v6e", source=_TPU),
        Chip(name="v5p", title="TPU v5p", platform="tpu", memory=int(95.73 * _GIB), bandwidth=2.46e12, flops=459e12,
             dims=3, accelerator_type="v5p-8", link="ici-v5p", source=_TPU),
        Chip(name="tpu7x", title="TPU v7x (one core)", platform="tpu", memory=int(94.74 * _GIB), bandwidth=3.7e12,
             flops=1155e12, dims=3, cores=2, accelerator_type="tpu7x-8", link="ici-tpu7x", source=_TPU),
        Chip(name="a100", title="NVIDIA A100-SXM4-80GB", platform="gpu", memory=84_974_239_744,
             bandwidth=2.039e12, flops=312e12, target=_AMPERE, link="nvlink3", source=_GPU),
        Chip(name="h100", title="NVIDIA H100 80GB HBM3", platform="gpu", memory=84_942_979_072,
             bandwidth=3.35e12, flops=989e12, target=_HOPPER, link="nvlink4", source=_GPU),
        Chip(name="h200", title="NVIDIA H200 141GB HBM3e", platform="gpu", memory=151_397_597_184,
             bandwidth=4.8e12, flops=989e12, target=_HOPPER, link="nvlink4", source=_GPU),
        Chip(name="b200", title="NVIDIA B200", platform="gpu", memory=191_514_411_008,
             bandwidth=7.67e12, flops=2250e12, target=_BLACKWELL, link="nvlink5", source=_GPU),
        Chip(name="cpu", title="two cores of an AMD EPYC with AVX2, a virtual machine", platform="cpu",
             memory=24 * _GIB, bandwidth=9.2e9, flops=131e9, dtype="float32",
             source="measured with numpy on one core of a shared machine: reads 9.2 GB/s, multiplies 65.6 GFLOP/s "
                    "of float32, twice that counted; `jcb simulate --calibrate` fits the machine at hand"),
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
    known = [chip.name for chip in CHIPS.values() if chip.platform != "cpu"]
    if name not in known:
        raise ValueError(f"topology {text!r}: no chip {name!r} is known, only {', '.join(known)}")
    chip = CHIPS[name]
    dims = chip.dims or 1
    if not colon:
        return Topology(chip, (1,) * dims)
    example = f"{name}:" + ("8" if not chip.dims else "x".join("22" + "1" * (dims - 2)))
    if not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", rest) or rest.count("x") + 1 != dims:
        raise ValueError(f"topology {text!r} must be a chip and its grid, for example {example}")
    return Topology(chip, tuple(int(size) for size in rest.split("x")))


def chip_named(name: str) -> Chip:
    """The chip called `name`. Raises ValueError that lists those known."""
    if name.lower() not in CHIPS:
        raise ValueError(f"no chip {name!r} is known, only {', '.join(CHIPS)}")
    return CHIPS[name.lower()]
