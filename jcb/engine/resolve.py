"""Every "auto" of a ServeConfig becomes a value, in one place: data type, how weights are kept, pages, lengths.

Host half: the server and `jcb plan` count with the very same functions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jcb.config import Limits, ModelConfig, ServeConfig, Weights
from jcb.engine.memory import Device, MemoryPlan, pages_for_budget
from jcb.models.specs import nbytes, param_specs
from pallas_kernels.native.build import NotBuiltError, find_library
from pallas_kernels.packed import FOUR_BIT_FORMATS
from pallas_kernels.page import PageShape

_PAGE_SIZES = {"cpu": 16, "gpu": 16, "tpu": 128}
_FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # words of /proc/cpuinfo; the last is ARM's


def resolve(config: ServeConfig, model: ModelConfig, device: Device, devices: int) -> ServeConfig:
    """`config` with every "auto" replaced by the value for `devices` devices like `device` and this model."""
    dtype = auto_dtype(device.platform) if config.dtype == "auto" else config.dtype
    page_size = config.cache.page_size or _PAGE_SIZES.get(device.platform, 16)
    kv_dtype = dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    cache = dataclasses.replace(config.cache, page_size=page_size, kv_dtype=kv_dtype)
    config = dataclasses.replace(config, dtype=dtype, cache=cache)
    config = dataclasses.replace(config, weights=_weights(config, model, device.platform, devices))
    _check_activations(config, model)
    max_model_len = config.scheduler.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(f"{max_model_len=} is above the model's {model.max_position_embeddings} positions")
    num_pages = config.cache.num_pages or _auto_pages(config, model, max_model_len, device, devices)
    if not config.scheduler.max_model_len:
        max_model_len = min(max_model_len, (num_pages - 1) * page_size)
    half = config.scheduler.chunk_half_position or chunk_half_position(model)
    ladder = config.scheduler.bucket_ladder
    if ladder == "auto":
        ladder = "fine" if device.platform == "cpu" else "coarse"
    found = {"max_model_len": max_model_len, "chunk_half_position": half, "bucket_ladder": ladder}
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, num_pages=num_pages),
        scheduler=dataclasses.replace(config.scheduler, **found),
    )


def chunk_half_position(model: ModelConfig) -> int:
    """Tokens before a prompt token at which attention to them takes as many operations as its matrix products."""
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    matrices = 2 * width * heads + 2 * width * model.num_kv_heads * model.head_dim + 3 * width * model.intermediate_size
    return max(2 * matrices // (4 * heads), 1)


def auto_dtype(platform: str) -> str:
    """bfloat16 where the device multiplies it fast, else float32."""
    if platform != "cpu":
        return "bfloat16"
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words.intersection(_FAST_BFLOAT16) else "float32"


def _weights(config: ServeConfig, model: ModelConfig, platform: str, devices: int) -> Weights:
    """How weights are kept. Raises ValueError where they cannot be kept as asked."""
    if config.weights == "as-shipped":
        if devices > 1:
            raise ValueError(f"weights='as-shipped' cannot be split over {devices} devices; use weights='dense'")
        if not model.shipped:
            raise ValueError("weights='as-shipped' needs a GGUF file with tensors in Q4_0, Q4_1 or Q8_0; use 'dense'")
    if config.weights != "auto":
        return config.weights
    fits = platform == "cpu" and devices == 1 and config.dtype == "float32" and model.shipped
    return "as-shipped" if fits and _kernels_are_built() else "dense"


def _kernels_are_built() -> bool:
    """Whether the C++ kernels are there; XLA alone is faster with dense weights."""
    try:
        find_library()
    except NotBuiltError:
        return False
    return True


def _check_activations(config: ServeConfig, model: ModelConfig) -> None:
    """Raises ValueError where "int8" would change nothing."""
    kept = {format for _, format in as_kept(config, model).shipped}
    if config.activations == "int8" and not kept.intersection(FOUR_BIT_FORMATS):
        held = f"weights={config.weights!r} keeps " + (", ".join(sorted(kept)) or "none packed")
        can = {format for _, format in model.shipped}.intersection(FOUR_BIT_FORMATS) and config.weights == "dense"
        use = "weights='as-shipped'" if can else "activations='full'"
        raise ValueError(f"activations='int8' needs packed Q4_0 or Q4_1 weights, and {held}; use {use}")


def as_kept(config: ServeConfig, model: ModelConfig) -> ModelConfig:
    """`model` as a resolved `config` computes it: which parameters stay packed, and what meets them."""
    shipped = model.shipped if config.weights == "as-shipped" else ()
    return dataclasses.replace(model, shipped=shipped, activations=config.activations)


def page_shape_of(config: ServeConfig, model: ModelConfig, platform: str) -> PageShape:
    """What a page takes for a resolved config."""
    return PageShape(platform, config.cache.kv_dtype, model.num_kv_heads, model.head_dim, config.cache.page_size)


def limits_of(config: ServeConfig, vocab_size: int) -> Limits:
    """The numbers of a resolved config that the scheduler and the device must agree on."""
    return Limits(
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=vocab_size,
    )


def plan_memory(config: ServeConfig, model: ModelConfig, temporaries: int, device: Device, devices: int) -> MemoryPlan:
    """What each device will hold for a resolved config; made before pages are allocated."""
    return MemoryPlan(
        weights=weight_bytes(config, model, devices),
        pages=config.cache.num_pages * page_bytes(config, model, device.platform, devices),
        temporaries=temporaries,
        budget=device.budget,
    )


def weight_bytes(config: ServeConfig, model: ModelConfig, devices: int) -> int:
    """Bytes of weights on each device, for a config whose dtype and weights are resolved."""
    return nbytes(param_specs(as_kept(config, model)), config.dtype, devices)


def page_bytes(config: ServeConfig, model: ModelConfig, platform: str, devices: int) -> int:
    """Bytes of one page of all layers on each device, for a config whose kv_dtype and page size are resolved."""
    return model.num_layers * page_shape_of(config, model, platform).page_bytes // devices


def _auto_pages(config: ServeConfig, model: ModelConfig, max_model_len: int, device: Device, devices: int) -> int:
    """Pages that fit the memory given for them, at most what max_num_seqs full sequences can use."""
    useful = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.page_size) + 1
    each = page_bytes(config, model, device.platform, devices)
    return min(useful, pages_for_budget(device, config.cache.memory_gib, each, weight_bytes(config, model, devices)))
