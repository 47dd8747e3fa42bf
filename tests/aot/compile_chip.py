"""Run by the tests in a child process that has the compilers: everything that is compiled for one chip, as JSON lines.

`python -m tests.aot.compile_chip TOPOLOGY [steps] [chunks] [cases] [brief]`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jcb.aot import traffic
from jcb.aot.worker import Preflight, devices_of
from jcb.chips import Topology, parse_topology
from jcb.config import CacheConfig, MeshConfig, SchedulerConfig, ServeConfig
from jcb.models.presets import PRESETS
from jcb.steps.registry import compile_threads, name_of
from pallas_kernels import kv_write, paged_attention
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.paged_attention import cases as attention_cases

Task = Callable[[], dict[str, Any]]

ROWS, CONTEXT, CHUNK = 64, 2048, 512
DECODE, PREFILL = f"decode {ROWS}", f"prefill {CHUNK} x {ROWS}"
SMALL = "smollm2-135m"
MODELS = (SMALL, "llama-3.1-8b", "qwen3-8b")
BRIEF_MODEL = "llama-3.1-8b"
BRIEF_CASES = ("decode_fp8_bf16", "prefill_bf16", "mixed_gqa8_128", "chunk_page_128", "bf16")


def config(topology: Topology) -> ServeConfig:
    """64 rows of 2,048 tokens, and pages for exactly these."""
    page_size = 128 if topology.chip.platform == "tpu" else 64
    return ServeConfig(
        dtype="bfloat16",
        cache=CacheConfig(page_size=page_size, num_pages=ROWS * CONTEXT // page_size + 1),
        scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=CHUNK, max_model_len=CONTEXT),
        mesh=MeshConfig(tensor_parallel=topology.num_devices // topology.chip.cores),
    )


def steps(topology: Topology) -> list[Task]:
    """decode_step of every model and prefill_step of the small one, which is on one device."""
    return _steps(topology, [(name, DECODE) for name in MODELS] + [(SMALL, PREFILL)])


def chunks(topology: Topology) -> list[Task]:
    """prefill_step of the large models: the programs that compile longest."""
    return _steps(topology, [(name, PREFILL) for name in MODELS if name != SMALL])


def _steps(topology: Topology, programs: list[tuple[str, str]]) -> list[Task]:
    tasks: list[Task] = []
    for name, program in programs:
        where = parse_topology(topology.chip.name) if name == SMALL else topology
        preflight = Preflight(config(where), PRESETS[name], where)
        tasks += [partial(_step, preflight, name, key) for key in preflight.registry.keys if name_of(key) == program]
    return tasks


def _step(preflight: Preflight, name: str, key: Any) -> dict[str, Any]:
    layout = preflight.statics.split(preflight.placement).layout
    cache = preflight.model.num_layers * preflight.limits.num_pages * layout.page_bytes
    row, text = preflight.compile(key)
    return {
        "kind": "step",
        "model": name,
        "program": row.name,
        "cache": cache,
        "alias": row.alias_bytes,
        "temporary": row.temp_bytes,
        "bytes": row.bytes_accessed,
        "floor": row.floor_bytes,
        "unknown_loops": row.unknown_loops,
        "moves": traffic.large_moves(text, cache // 4) if text else [],
        "error": row.error,
        "seconds": row.seconds,
    }


def brief(topology: Topology) -> list[Task]:
    """One step and a few cases: what is left when there is no time for more."""
    return _steps(topology, [(BRIEF_MODEL, DECODE)]) + cases(topology, BRIEF_CASES)


def cases(topology: Topology, names: Collection[str] = ()) -> list[Task]:
    """The two ops in all their named cases, or those of `names`, by the chip's own kernel."""
    platform = topology.chip.platform
    mesh = Mesh(devices_of(topology)[:1], ("tensor",), axis_types=(AxisType.Auto,))
    tasks: list[Task] = []
    for case in attention_cases.CASES:
        if names and case.name not in names:
            continue
        call = partial(
            paged_attention.paged_attention,
            layout=case.layout(platform),
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            max_q_len=case.max_q_len,
            implementation=platform,
        )
        options = attention_cases.make_options(case)._asdict()
        arguments = (attention_cases.make(case, platform), options)
        tasks.append(partial(_case, "paged_attention", case.name, mesh, call, *arguments))
    for case in write_cases.CASES:
        if names and case.name not in names:
            continue
        call = partial(kv_write.kv_write, layout=case.layout(platform), implementation=platform)
        options = {"kv_scales": write_cases.make_scales(case)}
        tasks.append(partial(_case, "kv_write", case.name, mesh, call, write_cases.make(case, platform), options))
    return tasks


def _case(op: str, name: str, mesh: Mesh, call: Any, args: Any, options: Any) -> dict[str, Any]:
    sharding = NamedSharding(mesh, PartitionSpec())
    args, options = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (args, options)
    )
    start, refused, error = time.perf_counter(), "", ""
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(lambda args, options: call(*args, **options)).lower(args, options)
        lowered.compile()
    except NotImplementedError as refusal:
        refused = str(refusal)
    except Exception as failure:  # whatever a compiler says belongs to the case
        error = f"{type(failure).__name__}: {failure}"[:2000]
    seconds = time.perf_counter() - start
    return {"kind": "case", "op": op, "case": name, "refused": refused, "error": error, "seconds": seconds}


def main() -> None:
    """Prints one line a result, in the order of the tasks."""
    topology, parts = parse_topology(sys.argv[1]), sys.argv[2:]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers print to stdout
    tasks = [task for part in (steps, chunks, cases, brief) if part.__name__ in parts for task in part(topology)]
    with compile_threads(os.cpu_count() or 1) as pool:
        for result in pool.map(lambda task: task(), tasks):
            print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
