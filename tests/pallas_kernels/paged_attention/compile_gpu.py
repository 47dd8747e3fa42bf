"""Run by the tests in a child process that has NVIDIA's compiler: what ptxas says of the attention kernels.

`python -m tests.pallas_kernels.paged_attention.compile_gpu TOPOLOGY DUMP_FOLDER`, with MOSAIC_GPU_DUMP_TO and
MOSAIC_GPU_DUMP_PTX set, prints one JSON line a kernel.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jcb.aot.worker import devices_of
from jcb.chips import parse_topology
from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import paged_attention

ROWS, CONTEXT = 64, 2048
SHAPES = {"smollm2": (9, 3, 64, 16), "llama-3.1-8b and qwen3-8b": (32, 8, 128, 64)}
"""Query heads, KV heads, head_dim, page size."""


def compile_shape(mesh: Mesh, num_heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Decoding of 64 rows of 2,048 tokens, and a mixed batch of 512 tokens of them."""
    layout = KVLayout("gpu", "bfloat16", kv_heads, head_dim, page_size)
    place = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    width = CONTEXT // page_size
    pages = place(layout.array_shape(2, ROWS * width + 1), "bfloat16")
    lengths = (place((ROWS, width), jnp.int32), place((ROWS,), jnp.int32), place((ROWS + 1,), jnp.int32))
    for tokens, max_q_len in ((ROWS, 1), (512, None)):
        call = partial(paged_attention, layout=layout, max_q_len=max_q_len, implementation="gpu")
        q, scalar = place((tokens, num_heads, head_dim), jnp.bfloat16), place((), jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(call).lower(q, pages, scalar, *lengths, scalar)
        lowered.compile()


def reports(folder: Path) -> list[dict[str, object]]:
    """What each ptxas report in `folder` says, and whether the PTX beside it has TMA copies and wgmma; empties it."""
    found = []
    for report in sorted(folder.glob("*.ptxas")):
        text, ptx = report.read_text(), report.with_suffix(".ptx").read_text()
        number = lambda pattern, text=text: int(re.findall(pattern, text)[0])  # noqa: E731
        found.append(
            {
                "kernel": re.sub(r"_\d+$", "", report.stem),
                "target": re.findall(r"for '(sm_\w+)'", text)[0],
                "registers": number(r"Used (\d+) registers"),
                "spill_stores": number(r"(\d+) bytes spill stores"),
                "spill_loads": number(r"(\d+) bytes spill loads"),
                "wgmma": ptx.count("wgmma.mma_async"),
                "tma": ptx.count("cp.async.bulk.tensor"),
            }
        )
    for file in folder.iterdir():
        file.unlink()
    return found


def main() -> None:
    topology, folder = parse_topology(sys.argv[1]), Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    mesh = Mesh(devices_of(topology)[:1], ("tensor",), axis_types=(AxisType.Auto,))
    for name, shape in SHAPES.items():
        compile_shape(mesh, *shape)
        for report in reports(folder):
            print(json.dumps({"shape": name, **report}), file=out, flush=True)


if __name__ == "__main__":
    main()
