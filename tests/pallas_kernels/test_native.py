"""The C++ library: built, found, refused when its sources changed, and never a reason for an install to fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pallas_kernels import native
from pallas_kernels.native import build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include "{package}/native/add.h"
extern "C" int add(int a, int b) {{ return a + b + kMore; }}
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """A package with one tiny op and one shared header."""
    folder = tmp_path / "kernels"
    for name in ("native", "adding"):
        (folder / name).mkdir(parents=True)
    (folder / "native/add.h").write_text("constexpr int kMore = 1;\n")
    (folder / "adding/cpu.cc").write_text(SOURCE.format(package="kernels"))
    return folder


def has_compiler() -> bool:
    try:
        build.find_compiler()
    except build.NotBuiltError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@needs_compiler
def test_builds_and_finds_the_library(package):
    with pytest.raises(build.NotBuiltError, match="are not built"):
        build.find_library(package)
    path = build.build(package)
    assert build.find_library(package) == path
    assert [file.name for file in path.parent.iterdir() if file.name != "add.h"] == [path.name]


@needs_compiler
@pytest.mark.parametrize("changed", ["adding/cpu.cc", "native/add.h"])
def test_a_stale_library_is_refused_and_removed_by_the_next_build(package, changed):
    old = build.build(package)
    with (package / changed).open("a") as file:
        file.write("// changed\n")
    with pytest.raises(build.NotBuiltError, match="built from other sources"):
        build.find_library(package)
    new = build.build(package)
    assert new != old
    assert not old.exists()
    assert build.find_library(package) == new


@needs_compiler
def test_a_new_source_makes_the_library_stale(package):
    build.build(package)
    (package / "other").mkdir()
    (package / "other/cpu.cc").write_text('extern "C" int other() { return 1; }\n')
    with pytest.raises(build.NotBuiltError, match="built from other sources"):
        build.find_library(package)


@needs_compiler
def test_a_compile_error_is_told_and_leaves_nothing(package):
    (package / "adding/cpu.cc").write_text("this is not C++\n")
    with pytest.raises(build.NotBuiltError, match=r"do not compile: .*(?s:.)*error"):
        build.build(package)
    assert [file.name for file in (package / "native").iterdir()] == ["add.h"]


def test_no_compiler_is_told(package, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(package))
    with pytest.raises(build.NotBuiltError, match=r"no C\+\+ compiler"):
        build.build(package)
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    with pytest.raises(build.NotBuiltError, match="/no/such/compiler"):
        build.build(package)


def test_a_library_that_cannot_be_loaded_is_a_reason_not_a_crash(package, monkeypatch):
    path = build.library_path(package)
    path.write_bytes(b"not a library")
    monkeypatch.setattr(native, "find_library", lambda: path)
    native.why_not.cache_clear()
    try:
        assert "cannot be loaded" in native.why_not()
        assert not native.available()
        with pytest.raises(NotImplementedError, match="cannot be loaded"):
            native.register()
    finally:
        native.why_not.cache_clear()


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "it is there")
def test_registering_twice_is_harmless():
    native.register()
    native.register()


def make_wheel(tmp_path: Path, **environment: str) -> Path:
    """A wheel of the tree as it is, made without isolation, in a copy that has no library."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("jcb", "pallas_kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "serve.py"):
        shutil.copy(ROOT / name, copy / name)
    script = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=copy, env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=170, check=True,
    )  # fmt: skip
    assert ("C++ kernels: not built" in done.stderr) == ("CXX" in environment)
    return tmp_path / done.stdout.split()[-1]


def test_without_a_compiler_the_install_goes_on_in_pure_python(tmp_path):
    pytest.importorskip("hatchling")
    wheel = make_wheel(tmp_path, CXX="/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_hook_names_the_platform_of_a_wheel_with_the_library(tmp_path, package, monkeypatch):
    pytest.importorskip("hatchling")
    from pallas_kernels.native import hatch_build

    library = build.library_path(package)
    library.write_bytes(b"library")
    monkeypatch.setattr(hatch_build, "_build_module", lambda: build)
    monkeypatch.setattr(build, "library_path", lambda: library)
    hook = object.__new__(hatch_build.NativeBuildHook)
    monkeypatch.setattr(hatch_build.NativeBuildHook, "root", str(package.parent))
    data: dict = {"force_include": {}, "pure_python": True}
    hook.initialize("standard", data)
    assert data["force_include"] == {str(library): f"kernels/native/{library.name}"}
    assert not data["pure_python"]
    assert data["tag"].startswith("py3-none-" + sysconfig.get_platform().split("-")[0])
    editable: dict = {"force_include": {}}
    hook.initialize("editable", editable)
    assert editable == {"force_include": {}}
