"""Every parameter of a model, declared once: shapes, axes and initialisers. Host half: counting bytes needs no device.

Initialising, loading and sharding are tree-maps over it (`jcb.models.params`); nothing else repeats a shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcb.axes import local_size
from jcb.config import ModelConfig
from pallas_kernels.packed import PackedShape
from pallas_kernels.page import ITEM_BYTES


@dataclass(frozen=True)
class ParamSpec:
    """One array: its shape, the logical name of each axis, and how random weights are drawn.

    axes name what an axis means ("layers", "vocab", "model", "heads", "ffn"); a mesh maps them to devices.
    scale: standard deviation of random weights, or None for ones (norms). format: of `pallas_kernels.packed` when the
    parameter stays packed, "" when it is dense.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    scale: float | None
    format: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def packed(self) -> PackedShape:
        """How a packed parameter lies in memory."""
        layers = self.shape[0] if self.axes[0] == "layers" else 1
        return PackedShape(self.format, layers, *self.shape[-2:])

    def nbytes(self, dtype: str, devices: int) -> int:
        """Bytes on each device; a packed one is not split."""
        if self.format:
            return self.packed.nbytes
        return ITEM_BYTES[dtype] * local_size(self.shape, self.axes, devices)


Specs = dict[str, Any]
"""A nested dict of ParamSpec; the params pytree has the same keys with arrays."""


def leaves(specs: Specs) -> Iterator[ParamSpec]:
    """Every ParamSpec."""
    for node in specs.values():
        if isinstance(node, ParamSpec):
            yield node
        else:
            yield from leaves(node)


def nbytes(specs: Specs, dtype: str, devices: int = 1) -> int:
    """Bytes of the params in `dtype` on each of `devices` that share them."""
    return sum(spec.nbytes(dtype, devices) for spec in leaves(specs))


def param_specs(config: ModelConfig) -> Specs:
    """Every parameter of a model of the Llama architecture (see `jcb.models.llama`)."""
    depth, model, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
    scale = model**-0.5
    stacked: Specs = {
        "attention_norm": ParamSpec((depth, model), ("layers", "model"), None),
        "w_qkv": ParamSpec((depth, qkv_size, model), ("layers", "heads", "model"), scale),
        "w_out": ParamSpec((depth, model, q_size), ("layers", "model", "heads"), q_size**-0.5),
        "mlp_norm": ParamSpec((depth, model), ("layers", "model"), None),
        "w_gate_up": ParamSpec((depth, 2 * ffn, model), ("layers", "ffn", "model"), scale),
        "w_down": ParamSpec((depth, model, ffn), ("layers", "model", "ffn"), ffn**-0.5),
    }
    if config.attention_bias:
        stacked["b_qkv"] = ParamSpec((depth, qkv_size), ("layers", "heads"), 0.02)
        stacked["b_out"] = ParamSpec((depth, model), ("layers", "model"), 0.02)
    if config.qk_norm:
        stacked["q_norm"] = ParamSpec((depth, config.head_dim), ("layers", "head_dim"), None)
        stacked["k_norm"] = ParamSpec((depth, config.head_dim), ("layers", "head_dim"), None)
    specs: Specs = {
        "embedding": ParamSpec((config.vocab_size, model), ("vocab", "model"), scale),
        "layers": stacked,
        "final_norm": ParamSpec((model,), ("model",), None),
    }
    if not config.tie_word_embeddings:
        specs["head"] = ParamSpec((config.vocab_size, model), ("vocab", "model"), scale)
    for path, format in config.shipped:
        *outer, name = path.split("/")
        group = specs[outer[0]] if outer else specs
        group[name] = dataclasses.replace(group[name], format=format)
    return specs
