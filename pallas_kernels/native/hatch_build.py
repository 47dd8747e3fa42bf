"""Builds the C++ kernels while the package is installed. Never fails the install: without them XLA does their work."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _build_module() -> Any:
    """`build.py` by its path: the package itself imports JAX, which the build environment need not have."""
    spec = importlib.util.spec_from_file_location("pallas_kernels_native_build", Path(__file__).with_name("build.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface):
    """Puts the library into the wheel; an editable install finds it in the source tree."""

    def dependencies(self) -> list[str]:
        """jaxlib for its headers, in the version range of the package, where there is a compiler to use them."""
        build = _build_module()
        try:
            build.find_compiler()
        except build.NotBuiltError:
            return []
        return [text for text in self.metadata.core.dependencies if text.startswith("jaxlib")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the library unless it is there and fits, and names the platform of a wheel that has it."""
        build = _build_module()
        try:
            path = build.library_path()
            if not path.exists():
                build.build()
        except Exception as reason:  # whatever goes wrong, the package works without
            print(f"C++ kernels: not built, XLA does their work: {reason}", file=sys.stderr)
            return
        if version != "editable":
            build_data["force_include"][str(path)] = str(path.relative_to(self.root))
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
