"""The persistent compile cache: on by default, in a folder that only this user can write."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jcb.config import cache_folder


def use_compile_cache(setting: str) -> str:
    """Switch on the persistent compile cache and return its folder, "" when off.

    The folder is ours alone (0700), since what it holds is executed.
    """
    if not setting:
        return ""
    folder = cache_folder() / "xla" if setting == "auto" else Path(setting).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ValueError(
            f"compile cache {str(folder)!r} cannot be made ({error.strerror}); choose another with "
            "--set engine.compile_cache=FOLDER, or do without by leaving the value empty"
        ) from None
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise ValueError(
            f"compile cache {str(folder)!r} must belong to this user with mode 0700, since its content is executed; "
            "chmod 700 it or choose another with --set engine.compile_cache=FOLDER"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return str(folder)
