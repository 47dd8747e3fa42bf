"""What every test runs under. JAX reads these settings when first imported, so they are made here, before that."""

import importlib.util
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    # The kernels' signatures are checked on every call, shapes included where they name them.
    install_import_hook("pallas_kernels", "beartype.beartype")
