"""The C++ kernels: one optional shared library, registered with JAX when it is there.

Backends ask `available()` and refuse with `why_not()`. A handler is a symbol of the library made by
XLA_FFI_DEFINE_HANDLER_SYMBOL and listed in HANDLERS; `jax.ffi.ffi_call` knows it by the same name.
"""

from __future__ import annotations

import ctypes
import functools

from pallas_kernels.native.build import COMMAND, NotBuiltError, find_library

HANDLERS: tuple[str, ...] = ("pallas_kernels_paged_attention", "pallas_kernels_quantized_dot")
"""Names of the handlers, each defined in an op's `cpu.cc`."""

INSTRUCTION_SETS = ("", "avx512", "avx2", "plain")
"""What a caller of a kernel may name, "" for the best; `processor.h` chooses."""


def available() -> bool:
    """True when the library is there, built from the sources as they are, and registered."""
    return not why_not()


def register() -> None:
    """Registers the handlers with JAX, once. Raises NotImplementedError(why_not())."""
    if reason := why_not():
        raise NotImplementedError(reason)


def check_instruction_set(name: str) -> None:
    """Raises ValueError for one that is not among INSTRUCTION_SETS."""
    if name not in INSTRUCTION_SETS:
        raise ValueError(f"instruction_set={name!r} is not one of {INSTRUCTION_SETS}")


@functools.cache
def why_not() -> str:
    """Why the C++ kernels cannot be used, "" when they can; looked at once a process."""
    try:
        path = find_library()
    except NotBuiltError as missing:
        return str(missing)
    import jax  # the host half asks `build` through this package and must not load it

    try:
        library = ctypes.CDLL(str(path))
        for name in HANDLERS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except Exception as error:  # a library for another processor or another jaxlib must not stop the program
        return f"the C++ kernels ({path.name}) cannot be loaded: {error}; `{COMMAND} --force` builds them anew"
    return ""
