"""Every setting of jcb as frozen dataclasses, and the one place where "auto" becomes a value.

Host half. A TOML file in configs/ fills these; `--set section.key=value` and flags override it.
Bad values are a ValueError that names the value and the fix.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

AdmissionMode = Literal["paged", "reserve", "static"]
SchedulingPolicy = Literal["fcfs", "priority", "shortest-prompt", "longest-prefix", "fair-share"]
ChunkPolicy = Literal["fixed", "constant-latency"]
BucketLadder = Literal["auto", "coarse", "fine"]
Dtype = Literal["auto", "float32", "bfloat16"]
Weights = Literal["auto", "as-shipped", "dense"]
Activations = Literal["full", "int8"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a model, read from its checkpoint. Source: config.json or GGUF metadata.

    shipped: (path as in "layers/w_out", format of `pallas_kernels.packed`) of each parameter that can stay packed in
    memory as the file has it; the others are dense. activations: "int8" rounds what meets packed 4-bit weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    shipped: tuple[tuple[str, str], ...] = ()
    activations: Activations = "full"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model {name}={value!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    page_size: tokens a page; 0 chooses by platform (16 on CPU and GPU, 128 on TPU).
    num_pages: pages in the array, the dummy page 0 included; 0 plans them from `memory_gib`.
    memory_gib: GiB of each device for pages when num_pages is 0; 0 takes what the plan leaves free, at most what can be
    used.
    enable_prefix_caching: share full pages of equal prefixes inside one namespace.
    kv_dtype: what keys and values are kept in; "auto" is the dtype of the model.
    """

    page_size: int = 0
    num_pages: int = 0
    memory_gib: float = 0.0
    enable_prefix_caching: bool = True
    kv_dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        if self.page_size < 0 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size} must be a power of two, or 0 for auto")
        if self.num_pages < 0 or self.num_pages == 1:
            raise ValueError(f"num_pages={self.num_pages} must be 0 (auto) or at least 2 (page 0 is a dummy)")
        if not 0 <= self.memory_gib < 1e6:
            raise ValueError(f"memory_gib={self.memory_gib} must be 0 (auto) or a number of GiB")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs in the next step.

    max_num_seqs: most sequences in one step (batch slots). max_num_batched_tokens: most tokens in one step.
    max_prefill_chunk: most prompt tokens of one sequence in one step; 0 means the whole budget.
    chunk_policy: "fixed" chunks are as long as budget and max_prefill_chunk allow; with "constant-latency" they are so
    at the start of a prompt and shrink along it, so that attention to what came before makes no step longer.
    chunk_half_position: for that, where a prompt token's attention costs as much as its matrix products; 0: from the
    model's shape.
    policy: who waits less. "fcfs": by arrival; "priority": by the request's priority; "shortest-prompt": short prompts
    first, where 1,000 tokens weigh a second of waiting; "longest-prefix": what the prefix cache holds first, but nobody
    is passed over more than 16 times as first of the queue; "fair-share": users (namespaces) by turns, in tokens. Only
    "priority" decides who is preempted too; elsewhere that is the last to arrive.
    admission: "paged" by actual use; "reserve" takes pages for the longest possible answer at admission;
    "static" fills a batch, runs it to its end, then the next (the last two are kept for comparison).
    preempt_every: force a preemption of the youngest sequence every so many steps (tests only; 0 is off).
    queue_timeout / run_timeout: seconds a request may wait / run. max_queued: most waiting requests; 0: auto.
    max_queued_tokens: most waiting prompt tokens; 0: 8 times what the pool holds.
    decode_row_buckets, prefill_row_buckets, token_buckets: sizes that step programs are compiled for (rows of decode
    steps, rows and tokens of the others), ascending; none makes the ladders of `jcb.steps.shapes`. See `jcb buckets`.
    bucket_ladder: of those ladders, "coarse" doubles, "fine" has a size between two doublings from 64 on, for devices
    whose steps take longer with every token; "auto": fine on CPUs.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 0
    chunk_policy: ChunkPolicy = "fixed"
    chunk_half_position: int = 0
    max_model_len: int = 0
    policy: SchedulingPolicy = "fcfs"
    admission: AdmissionMode = "paged"
    preempt_every: int = 0
    queue_timeout: float = 60.0
    run_timeout: float = 600.0
    max_queued: int = 0
    max_queued_tokens: int = 0
    decode_row_buckets: tuple[int, ...] = ()
    prefill_row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    bucket_ladder: BucketLadder = "auto"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not hold one token for each running sequence; raise the first or lower the second"
            )
        whole = ("max_prefill_chunk", "chunk_half_position", "max_model_len", "preempt_every")
        for name in (*whole, "max_queued", "max_queued_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("queue_timeout", "run_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 seconds")
        self._check_buckets("decode_row_buckets", "max_num_seqs")
        self._check_buckets("prefill_row_buckets", "max_num_seqs")
        self._check_buckets("token_buckets", "max_num_batched_tokens")

    def _check_buckets(self, name: str, limit: str) -> None:
        """Every legal step must fit a bucket, and none may have one row (see `jcb.steps.shapes`)."""
        sizes, top = getattr(self, name), max(getattr(self, limit), 2)
        if not sizes:
            return
        if sizes[0] < 2 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"{name}={list(sizes)} must ascend from 2 or more")
        if sizes[-1] < top:
            raise ValueError(f"{name}={list(sizes)} must reach {limit}={getattr(self, limit)}: add {top}, or lower it")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How a model spreads over devices. tensor_parallel: devices that share every layer; it must divide the model's
    heads, KV heads and feed-forward width.
    """

    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The step loop. overlap: plan step n + 1 while the device runs n. seed: None draws entropy for requests
    without a seed; a number makes them reproducible. implementation: which kernels, "auto" picks by device.
    record: a file to which arrivals, plans and step times go, "" for none; without texts and token ids unless
    record_token_ids is set.
    """

    overlap: bool = True
    seed: int | None = None
    implementation: str = "auto"
    compile_cache: str = "auto"  # "auto": ~/.cache/jcb/xla; "": off; else a folder
    record: str = ""
    record_token_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side.

    api_key_file: one key a line; none leaves the server open (loopback only unless insecure). admin_key_file: the keys
    for the routes that change the server. admin_port: a second port, on the loopback and without keys, to which those
    routes and /metrics move; 0 leaves them on the first. max_connections(_per_peer): open at once. header_seconds,
    body_seconds: how long a request may take to arrive; idle_seconds: how long a connection may wait for its next
    one; stall_seconds: how long one write may wait for a slow reader. profile_folder: where /start_profile writes;
    "" leaves it out. cors_origins: web origins that may read answers, with commas between; "*" is all. vllm_metrics:
    every metric also under vLLM's name. otlp_endpoint: where traces go; "" traces nothing. playground: the page at /
    and what feeds it. live_knobs: whether admins may change the scheduler's limits there, up to what was compiled.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    api_key_file: str = ""
    insecure: bool = False
    strict_fields: bool = False
    admin_key_file: str = ""
    admin_port: int = 0
    drain_seconds: float = 30.0
    max_body_bytes: int = 4 * 1024 * 1024
    max_connections: int = 2048
    max_connections_per_peer: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 15.0
    stall_seconds: float = 30.0
    profile_folder: str = ""
    cors_origins: str = ""
    vllm_metrics: bool = True
    otlp_endpoint: str = ""
    playground: bool = True
    live_knobs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be 0 (any free one) to 65535")
        if not 0 <= self.admin_port <= 65535 or (self.admin_port and self.admin_port == self.port):
            raise ValueError(f"admin_port={self.admin_port} must be 0 (none) or a port other than port={self.port}")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds={self.drain_seconds} must be a number of seconds, 0 or more")
        if not 0 < self.max_body_bytes <= 64 << 20:
            raise ValueError(f"max_body_bytes={self.max_body_bytes} must be 1 to {64 << 20:,}")
        for name in ("max_connections", "max_connections_per_peer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("header_seconds", "body_seconds", "idle_seconds", "stall_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds above 0")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `serve.py` needs. model: "default", a GGUF file, or a Hugging Face folder.

    weights: "as-shipped" keeps Q4_0, Q4_1 and Q8_0 tensors packed in memory as the file has them; "dense" makes all of
    them dtype; "auto" is as shipped where the C++ kernels are built and the dtype is float32, on one CPU. activations:
    "int8" rounds the inputs of products with packed 4-bit weights to 8 bits: faster on CPUs, and answers change a
    little; "full" leaves them in dtype.
    """

    model: str = "default"
    dtype: Dtype = "auto"
    weights: Weights = "auto"
    activations: Activations = "full"
    chat_template: str = ""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resolved numbers that the scheduler and admission need, all known before the first step."""

    page_size: int
    num_pages: int  # page 0 included: num_pages - 1 can be allocated
    max_model_len: int
    vocab_size: int

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def pages_per_seq(self) -> int:
        """Width of a page table row."""
        return self.pages_for(self.max_model_len)


def replace(config: ServeConfig, section: str, **values: object) -> ServeConfig:
    """A copy of `config` with fields of one section changed."""
    changed = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: changed})


def cache_folder() -> Path:
    """Where jcb keeps what it may throw away: compiled programs, stamps of checked files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jcb"
