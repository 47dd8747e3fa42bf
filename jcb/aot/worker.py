"""The child process: compiles the programs of one engine for a topology that is not here.

It runs with the compilers on its path (see `environment`) and JAX on the CPU; a job comes in as JSON on stdin, a plan
and one row a program go out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

from jcb.aot import traffic
from jcb.aot.floor import live_share, step_floor
from jcb.aot.gpu_target import gpu_target_config
from jcb.aot.protocol import Job, Plan, Row, encode
from jcb.chips import Topology, parse_topology
from jcb.config import Limits, ModelConfig, ServeConfig
from jcb.config_file import loads
from jcb.engine.memory import Device
from jcb.engine.resolve import as_kept, limits_of, plan_memory, resolve, weight_bytes
from jcb.sharding import Placement, tensor_parallel
from jcb.steps.registry import Program, Registry, compile_threads, name_of
from jcb.steps.shapes import StepShape
from jcb.steps.step import StepStatics

_ERROR_LENGTH = 600


def devices_of(topology: Topology) -> list[Any]:
    """JAX's devices of a topology that is not here; programs can be compiled for them and not run.

    Raises RuntimeError when the compiler for that platform cannot be loaded.
    """
    jax.devices()  # the plugins must be registered first
    if topology.chip.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
    found = topologies.get_topology_desc(
        "", platform="cuda", target_config=gpu_target_config(topology.chip), topology=f"1x1x{topology.num_devices}"
    )
    return found.devices


class Preflight:
    """One job: the resolved configuration and the registry whose programs are compiled."""

    def __init__(self, config: ServeConfig, model: ModelConfig, topology: Topology) -> None:
        self.topology = topology
        self.device = Device(topology.chip.platform, topology.chip.memory)
        self.placement = _placement(config, model, topology)
        self.config = resolve(config, model, self.device, self.placement.num_devices)
        self.model = as_kept(self.config, model)
        self.statics = StepStatics.of(self.config, self.model, self.device.platform)
        self.limits: Limits = limits_of(self.config, model.vocab_size)
        self._weights = weight_bytes(self.config, model, self.placement.num_devices)
        self.registry = Registry(self.statics, self.config.scheduler, self.limits, self.config.dtype, self.placement)

    def plan(self, names: tuple[str, ...]) -> Plan:
        """What each device will hold."""
        memory = plan_memory(self.config, self.model, 0, self.device, self.placement.num_devices)
        return Plan(
            devices=self.placement.num_devices,
            dtype=self.config.dtype,
            page_size=self.limits.page_size,
            num_pages=self.limits.num_pages,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            weights=memory.weights,
            pages=memory.pages,
            memory=self.device.memory,
            names=names,
        )

    def compile(self, key: Any) -> tuple[Row, str]:
        """One program of the registry, and its optimised text; a failure becomes a row that says why."""
        assert self.placement.mesh is not None
        try:
            with jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh):  # kernels ask it for the chip
                program = self.registry.compile(key)
            text = program.call.as_text()
            return self._row(key, program, text), text
        except Exception as error:  # compilers raise what they like; every one belongs to its program
            if os.environ.get("JCB_DEBUG"):
                logging.exception("%s", name_of(key))
            said = " ".join(str(error).split())[:_ERROR_LENGTH]
            return Row(name=name_of(key), error=said or type(error).__name__), ""

    def _row(self, key: Any, program: Program, text: str) -> Row:
        memory = program.call.memory_analysis()
        moved = traffic.count(text).at(live_share(key, self.limits) if isinstance(key, StepShape) else 1.0)
        row = Row(
            name=program.name,
            seconds=program.seconds,
            argument_bytes=program.argument_bytes,
            alias_bytes=program.alias_bytes,
            temp_bytes=program.temp_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            output_bytes=program.output_bytes,
            flops=moved.flops,
            bytes_accessed=moved.nbytes,
            weights_beside=0 if isinstance(key, StepShape) or key == "prompt" else self._weights,
            unknown_loops=moved.unknown_loops,
        )
        if not isinstance(key, StepShape):
            return row
        floor = step_floor(
            self.model, self.statics.layout, self.config.dtype, key, self.limits, self.placement.num_devices
        )
        return dataclasses.replace(row, floor_bytes=floor.nbytes, floor_seconds=floor.seconds(self.topology.chip))


def _placement(config: ServeConfig, model: ModelConfig, topology: Topology) -> Placement:
    count = config.mesh.tensor_parallel
    if count > topology.num_devices:
        raise ValueError(
            f"tensor_parallel={count} needs {count} devices, the topology {topology.name} has {topology.num_devices}"
        )
    return tensor_parallel(count, model, devices_of(topology))


def run(job: Job, send: Callable[[Plan | Row], None]) -> None:
    """Compile every program of `job`, sending the plan first and a row as each is done."""
    preflight = Preflight(loads(job.config), job.model_config, parse_topology(job.topology))
    keys = [key for key in preflight.registry.keys if not job.only or any(o in name_of(key) for o in job.only)]
    if not keys:
        known = ", ".join(name_of(key) for key in preflight.registry.keys)
        raise ValueError(f"no program's name contains {' or '.join(map(repr, job.only))}; there are {known}")
    send(preflight.plan(tuple(name_of(key) for key in keys)))
    with compile_threads(os.cpu_count() or 1) as pool:
        for row, _ in pool.map(preflight.compile, keys):
            send(row)


def main() -> int:
    """Reads one job from stdin. Bad settings are one line on stderr and status 2."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers print to stdout; what is ours goes out by its own descriptor
    try:
        run(Job(**json.load(sys.stdin)), lambda message: print(encode(message), file=out, flush=True))
    except ValueError as error:
        print(f"jcb: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
