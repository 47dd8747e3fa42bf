"""What every test runs under. JAX reads these settings when first imported, so they are made here, before that."""

import importlib.util
import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

DEVICE_HALF = ["pallas_kernels", "jcb.models", "jcb.sharding", "jcb.steps", "jcb.weights"]

if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    install_import_hook(DEVICE_HALF, "beartype.beartype")
