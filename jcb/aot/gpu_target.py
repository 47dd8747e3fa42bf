"""How XLA's GPU compiler is told of a GPU that is not here."""

from __future__ import annotations

from typing import Any

from jcb.chips import Chip

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
