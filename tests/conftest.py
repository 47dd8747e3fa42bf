"""What every test runs under. JAX reads these settings when first imported, so they are made here, before that."""

import importlib.util
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    # The kernels' signatures are checked on every call, shapes included where they name them.
    install_import_hook("pallas_kernels", "beartype.beartype")

LONGEST_FIRST = (
    "tests/e2e/test_golden.py",
    "tests/aot/test_chips_compiled.py",
    "tests/server/test_schemathesis.py",
    "tests/e2e/test_batch_invariance.py",
    "tests/pallas_kernels/paged_attention/test_tpu.py",
    "tests/e2e/test_serve_default_model.py",
    "tests/pallas_kernels/paged_attention/test_gpu_code.py",
    "tests/e2e/test_structured.py",
    "tests/pallas_kernels/paged_attention/test_gpu.py",
    "tests/models/test_llama.py",
)
"""Files that take minutes: begun last, one would keep a single process busy while the others have nothing left."""


def pytest_collection_modifyitems(items):
    """Long files first; the rest keeps its order."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
