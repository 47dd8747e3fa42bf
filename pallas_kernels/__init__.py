"""Kernels for serving: paged attention and KV writes, one folder an op, usable without jcb.

Every folder holds the same files: `__init__` (the typed public function and its contract), `reference`
(the specification in jnp), `xla` (runs everywhere), `cases` (named shapes for tests, benchmarks and tuning),
and, where they exist, `tpu`, `gpu` and `cpu` (backends for one platform).
"""
