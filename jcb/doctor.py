"""`jcb doctor`: what this machine has, which kernels will be used and why not the others, and what to mend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jcb import __version__
from jcb.config import cache_folder

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "aiohttp", "tokenizers", "safetensors", "minijinja", "pydantic", "tyro")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")

Row = tuple[str, str]


def run() -> int:
    """Prints the report; exit status 0 unless JAX or the default model cannot be used."""
    problems: list[str] = []
    _section("versions", versions())
    _section("devices", devices(problems))
    _section("kernels", kernels(problems))
    _section("memory", memory())
    _section("folders", folders())
    _section("default model", default_model(problems))
    for problem in problems:
        print(f"\nproblem: {problem}")
    print("\nall well" if not problems else "")
    return 1 if problems else 0


def _section(title: str, rows: Iterable[Row]) -> None:
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<22} {value}")


def versions() -> Iterator[Row]:
    """Python, jcb and the packages it stands on."""
    yield "jcb", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for name in _PACKAGES:
        yield name, _version(name) or "not installed"
    for name in _PLUGINS:
        if version := _version(name):
            yield name, version


def devices(problems: list[str]) -> Iterator[Row]:
    """What JAX computes on, and the accelerator it may be missing."""
    try:
        import jax

        for device in jax.devices():
            yield f"{device.platform}:{device.id}", device.device_kind
        backend = jax.default_backend()
    except Exception as error:  # any broken plugin or driver: the report goes on
        problems.append(f"JAX cannot start: {error}")
        return
    pip = f"{sys.executable} -m pip"
    if backend == "cpu" and shutil.which("nvidia-smi"):
        problems.append(f'JAX sees only the CPU, but there is an NVIDIA driver: {pip} install --editable ".[gpu]"')
    if backend == "cpu" and Path("/dev/accel0").exists():
        problems.append(f'JAX sees only the CPU, but there is a TPU: {pip} install --editable ".[tpu]"')


def kernels(problems: list[str]) -> Iterator[Row]:
    """For each op the implementation that "auto" takes here, then the others with their reasons."""
    try:
        from pallas_kernels import dispatch

        for op in dispatch.OPS:
            choices = dispatch.explain(op)
            used = next(choice for choice in choices if choice.available)
            yield op, used.implementation
            for choice in choices:
                if choice is not used:
                    yield "", f"not {choice.implementation}: {choice.reason if not choice.available else 'no need'}"
    except Exception as error:  # JAX may be the broken part
        problems.append(f"the kernels cannot be looked at: {error}")


def memory() -> Iterator[Row]:
    """Memory of the host and of each device that tells."""
    if hasattr(os, "sysconf"):
        page = os.sysconf("SC_PAGE_SIZE")
        yield "host, all", _gib(page * os.sysconf("SC_PHYS_PAGES"))
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            yield "host, free", f"{_gib(page * os.sysconf('SC_AVPHYS_PAGES'))} (file caches come on top)"
    try:
        import jax

        for device in jax.local_devices():
            if stats := device.memory_stats():
                used, limit = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
                yield f"{device.platform}:{device.id}", f"{_gib(limit)}, {_gib(used)} in use"
    except Exception:  # told already under devices
        return


def folders() -> Iterator[Row]:
    """Where jcb keeps what it may throw away, how large that is, and who may write there."""
    path = cache_folder()
    yield "cache", f"{path} ({_folder_state(path)})"
    yield "compiled programs", f"{path / 'xla'} ({_folder_state(path / 'xla')})"


def default_model(problems: list[str]) -> Iterator[Row]:
    """The file of the default model, checked against its SHA-256."""
    from jcb.checkpoint.default_model import default_model_path
    from jcb.checkpoint.errors import ModelLoadError

    try:
        path = default_model_path()
    except ModelLoadError as error:
        problems.append(str(error))
        return
    yield "file", str(path)
    yield "size", f"{path.stat().st_size / 1e6:.1f} MB"
    yield "SHA-256", "as expected"


def _folder_state(path: Path) -> str:
    if not path.is_dir():
        return "not there yet"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    mode = stat.S_IMODE(path.stat().st_mode)
    shared = ", writable by others: chmod 700 it" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
    return f"{size / 1e6:.1f} MB{shared}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: Any) -> str:
    return f"{size / 2**30:.1f} GiB"
