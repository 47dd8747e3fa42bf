"""The command's half: finds the compilers, starts the child process, gathers what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jcb import config_file
from jcb.aot.protocol import Job, Plan, Row, decode
from jcb.chips import Chip, Topology
from jcb.config import ServeConfig
from jcb.engine.model_shape import model_shape
from jcb.steps.compiler_options import set_libtpu_args

Progress = Callable[[str, int, int], None]

_PACKAGE = {"tpu": "libtpu", "gpu": "jax_plugins/xla_cuda13"}
_WORKER = "jcb.aot.worker"
_SHOWN_LINES = 20


@dataclass(frozen=True)
class Report:
    """Everything that was found out of one configuration on one topology."""

    topology: Topology
    plan: Plan
    rows: tuple[Row, ...]

    @property
    def needed_bytes(self) -> int:
        """Memory of each device that the hungriest program needs, weights and pages included."""
        return max((row.needed_bytes for row in self.rows), default=0)

    @property
    def problems(self) -> list[str]:
        """What would fail on the chip, one line each: the program, and the limit it meets."""
        found = [f"{row.name}: {row.error}" for row in self.rows if row.error]
        memory = self.topology.chip.memory
        found += [
            f"{row.name}: needs {row.needed_bytes / 2**30:.2f} GiB, {self.topology.chip.title} has {memory / 2**30:.2f}"
            for row in self.rows
            if row.needed_bytes > memory
        ]
        return found


def compilers() -> Path:
    """The folder of the compilers for other chips, made by `make install-aot`."""
    return Path(sys.prefix) / "aot"


def environment(chip: Chip, base: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the compilers on its path, JAX on the CPU, and no questions to a metadata server.

    Raises ValueError that says how to install the compiler when it is missing.
    """
    folder = compilers()
    if not (folder / _PACKAGE[chip.platform]).exists():
        raise ValueError(
            f"the compiler for {chip.title} is not installed (no {_PACKAGE[chip.platform]} in {folder}): "
            "run `make install-aot`"
        )
    root = str(Path(__file__).parents[2])
    paths = [str(folder), root, *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    tpu = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": chip.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"} if not base.get("JCB_DEBUG") else {}
    env = {**base, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", **quiet}
    if chip.platform == "tpu":
        env |= tpu
        set_libtpu_args(env)
    return env


def check(
    config: ServeConfig, topology: Topology, *, only: tuple[str, ...] = (), progress: Progress | None = None
) -> Report:
    """Compile every program of `config` for `topology` in a child process, and tell what each needs.

    only: texts of which a program's name must contain one. Raises ValueError for a configuration that cannot work,
    and ChildProcessError when the child process dies.
    """
    job = Job(
        topology=topology.name,
        config=config_file.dump(config),
        model=dataclasses.asdict(model_shape(config.model)),
        only=only,
    )
    plan, rows = None, []
    with closing(_messages(job, topology.chip)) as messages:
        for message in messages:
            if isinstance(message, Plan):
                plan = message
            else:
                rows.append(message)
            if progress is not None and plan is not None:
                progress("compile", len(rows), len(plan.names))
    if plan is None:
        raise ChildProcessError("the compiling process ended without a word; JCB_DEBUG=1 shows what it printed")
    return Report(topology, plan, tuple(rows))


def _messages(job: Job, chip: Chip) -> Generator[Plan | Row]:
    """What the child process says, as it says it; ValueError and ChildProcessError as of `check`."""
    debug = bool(os.environ.get("JCB_DEBUG"))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            env=environment(chip, os.environ),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if debug else errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(job)))
            process.stdin.close()
            yield from (message for line in process.stdout if (message := decode(line)) is not None)
            if status := process.wait():
                errors.seek(0)
                _raise(status, errors.read().splitlines()[-_SHOWN_LINES:])
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _raise(status: int, lines: list[str]) -> None:
    """What the child said last becomes the error."""
    if status == 2 and lines and lines[-1].startswith("jcb: "):
        raise ValueError(lines[-1].removeprefix("jcb: "))
    said = "\n".join(lines) or "JCB_DEBUG=1 shows what it prints"
    raise ChildProcessError(f"the compiling process ended with status {status}:\n{said}")
