"""Builds the C++ kernels (`cpu.cc` beside each op) into one shared library; standard library only.

The package's install runs it (`hatch_build.py`), `python -m pallas_kernels.native` runs it by hand. The library's name
holds a digest of everything it was built from, so one built from other sources is never found, let alone used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
COMMAND = "python -m pallas_kernels.native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility-inlines-hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
"""No -march: kernels pick their instruction set when they run. No -ffast-math: NaN and infinity keep their meaning."""

_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 600


class NotBuiltError(Exception):
    """Why there is no library; the text is for people."""


def sources(package: Path = PACKAGE) -> list[Path]:
    """The C++ file of each op that has one."""
    return sorted(package.glob("*/cpu.cc"))


def stamp(package: Path = PACKAGE) -> str:
    """16 hex digits of everything that decides what the library does: sources, headers, flags, processor family."""
    digest = hashlib.sha256(repr((FLAGS, platform.system(), platform.machine())).encode())
    for path in [*sources(package), *sorted(package.glob("*/*.h"))]:
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_path(package: Path = PACKAGE) -> Path:
    """Where the library of the sources as they are now belongs."""
    return package / "native" / f"kernels-{stamp(package)}.so"


def find_library(package: Path = PACKAGE) -> Path:
    """The library of the sources as they are now. Raises NotBuiltError."""
    path = library_path(package)
    if path.exists():
        return path
    others = sorted(other.name for other in path.parent.glob("kernels-*.so"))
    if others:
        raise NotBuiltError(
            f"the C++ kernels ({others[0]}) were built from other sources; `{COMMAND}` builds them anew"
        )
    raise NotBuiltError(f"the C++ kernels are not built; `{COMMAND}` builds them where there is a C++ compiler")


def find_compiler() -> list[str]:
    """The command of $CXX, else of the first C++ compiler on the path. Raises NotBuiltError."""
    if os.name != "posix":
        raise NotBuiltError(f"the C++ kernels are not built on {platform.system()}")
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NotBuiltError(f"no C++ compiler ({', '.join(_COMPILERS)} or $CXX) is on the path")
    return [found]


def include_dir() -> Path:
    """The FFI headers that jaxlib ships. Raises NotBuiltError."""
    spec = importlib.util.find_spec("jaxlib")
    folder = Path(spec.submodule_search_locations[0]) / "include" if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "xla/ffi/api/ffi.h").exists():
        raise NotBuiltError("jaxlib, whose headers the C++ kernels need, is not installed")
    return folder


def build(package: Path = PACKAGE) -> Path:
    """Compile and link the library, and remove those of other sources. Raises NotBuiltError."""
    compiler, include, target = find_compiler(), include_dir(), library_path(package)
    flags = [*FLAGS, f"-I{include}", f"-I{package.parent}"]
    try:
        # Beside its target, so that the last move is one step and a reader never sees half a file.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            objects = {path: str(Path(folder) / f"{path.parent.name}.o") for path in sources(package)}
            _run([[*compiler, *flags, "-c", str(path), "-o", out] for path, out in objects.items()])
            library = str(Path(folder) / target.name)
            _run([[*compiler, "-shared", *objects.values(), "-o", library]])
            os.replace(library, target)
    except OSError as error:
        raise NotBuiltError(f"{target.parent} cannot be written or {compiler[0]!r} not run: {error}") from error
    for other in target.parent.glob("kernels-*.so"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _run(commands: list[list[str]]) -> None:
    """Runs all at once. Raises NotBuiltError with the first error's lines."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    failures = []
    for command, process in zip(commands, running, strict=True):
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            failures.append(f"{shlex.join(command)} took more than {_SECONDS} s")
            continue
        if process.returncode:
            failures.append(f"{shlex.join(command)}\n{output.strip()}")
    if failures:
        raise NotBuiltError(f"the C++ kernels do not compile: {failures[0]}")
