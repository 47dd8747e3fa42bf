"""Step programs as JAX lowers them, kept in files: a later start neither traces nor lowers them, it only compiles.

With the compile cache in the same folder that is a read too. A file is named by a digest of everything its program
depends on and holds StableHLO as `jax.export` writes it, after a digest of its own: others are passed over.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax import export

import jcb
import pallas_kernels
from pallas_kernels import dispatch, native

_log = logging.getLogger(__name__)

_FLAGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
_CHECKS = [export.DisabledSafetyCheck.custom_call(name) for name in native.HANDLERS]


class LoweredCache:
    """Lowered step programs of one CPU device. Where a kernel is refused none is kept, so that each start says why."""

    def __init__(self, folder: Path, sources: tuple[Path, ...]) -> None:
        """folder: only this user may write there. sources: packages whose files decide what is traced."""
        self._folder = folder
        flags = [(name, str(getattr(jax.config, name))) for name in _FLAGS]
        versions = (jax.__version__, jaxlib.version.__version__)
        # Asking why_not registers the kernels, which compiled programs need whether or not they are traced here.
        self._facts = repr((versions, flags, native.why_not() or native.build.stamp(), _digest_of(sources)))

    @staticmethod
    def beside(compile_cache: str) -> LoweredCache | None:
        """The one inside the compile cache's folder, None where there is no such folder or no flatbuffers."""
        if not compile_cache or importlib.util.find_spec("flatbuffers") is None:
            return None
        folder = Path(compile_cache) / "lowered"
        folder.mkdir(mode=0o700, exist_ok=True)
        return LoweredCache(folder, tuple(Path(str(package.__file__)).parent for package in (jcb, pallas_kernels)))

    def lower(self, facts: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """`function` lowered for abstract `arguments`, the second donated and returned first: (state, *arrays).

        facts: all that `function` depends on beside its sources.
        """
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        key = hashlib.sha256(repr((self._facts, facts, function.__name__, str(tree), shapes)).encode()).hexdigest()
        program = self._read(key) or self._make(key, function, leaves, tree)
        state = jax.tree.structure(arguments[1])

        def call(*arguments: Any) -> tuple[Any, ...]:
            out = program.call(*jax.tree.leaves(arguments))
            return (jax.tree.unflatten(state, out[: state.num_leaves]), *out[state.num_leaves :])

        call.__name__ = function.__name__
        return jax.jit(call, donate_argnums=1).lower(*arguments)

    def _make(self, key: str, function: Any, leaves: list[Any], tree: Any) -> export.Exported:
        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

        program = export.export(jax.jit(flat), platforms=("cpu",), disabled_checks=_CHECKS)(*leaves)
        if not dispatch.some_refused():
            self._write(key, bytes(program.serialize()))
        return program

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.stablehlo"

    def _read(self, key: str) -> export.Exported | None:
        try:
            content = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("lowered program %s cannot be read: %s; it is made anew", self._path(key), error)
            return None
        digest, program = content[:32], content[32:]
        if digest != _digest(key, program):
            _log.warning("lowered program %s is damaged; it is made anew", self._path(key))
            return None
        return export.deserialize(bytearray(program))

    def _write(self, key: str, program: bytes) -> None:
        """In one move, so that no reader sees half a file; a full disk costs the next start time, nothing else."""
        temporary = ""
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self._folder)  # mode 0600
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(key, program) + program)
            os.replace(temporary, self._path(key))
        except OSError as error:
            _log.warning("lowered program %s cannot be written: %s", self._path(key), error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)


def _digest(key: str, program: bytes) -> bytes:
    return hashlib.sha256(key.encode() + program).digest()


def _digest_of(packages: tuple[Path, ...]) -> str:
    """Of every Python file and table of `packages`."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}")):
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
