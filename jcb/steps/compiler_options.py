"""What the compilers must be told so that a step reads its weights in place. No JAX here: one of them is set before."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""By platform. Triton's matrix products cannot read one layer of stacked weights in place, cuBLAS's can: with Triton
every step would copy all weights once."""

LIBTPU_ARGS = ("--xla_tpu_impure_enable_large_2nd_minor_layout=false",)
"""Else TPU v7x copies all stacked weights to another tiling in every step. Older chips compile the same either way."""


def set_libtpu_args(environment: MutableMapping[str, str]) -> None:
    """Add our arguments for libtpu to `environment`; libtpu reads them when it is loaded, a user's own come last."""
    own = environment.get("LIBTPU_INIT_ARGS", "").split()
    environment["LIBTPU_INIT_ARGS"] = " ".join([*(arg for arg in LIBTPU_ARGS if arg not in own), *own])
