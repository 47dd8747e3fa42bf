"""From a ServeConfig to an engine that is ready: every "auto" resolved, memory planned, programs compiled.

The order matters: sizes are decided from the checkpoint's header, the device's memory and the compilers' own
figures before the pages exist.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import Checkpoint, open_checkpoint
from jcb.config import Limits, ModelConfig, ServeConfig
from jcb.engine.admission import ModelInfo
from jcb.engine.core import EngineCore
from jcb.engine.executor import DeviceExecutor
from jcb.engine.memory import MemoryPlan, device_budget, pages_for_budget
from jcb.metrics import EngineMetrics
from jcb.models import llama
from jcb.models.params import nbytes
from jcb.scheduler.scheduler import Scheduler
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.text.chat import ChatTemplate
from jcb.text.tokenizer import Tokenizer, load_tokenizer
from jcb.weights.load import load_params
from pallas_kernels.layout import KVLayout

Progress = Callable[[str, int, int], None]

_PAGE_SIZES = {"cpu": 16, "gpu": 16, "tpu": 128}
_FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # words of /proc/cpuinfo; the last is ARM's


@dataclass(frozen=True)
class Engine:
    """A loaded model with everything the front needs; `config` has no "auto" left."""

    core: EngineCore
    executor: DeviceExecutor
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    info: ModelInfo
    config: ServeConfig
    metrics: EngineMetrics
    report: Mapping[str, Any]
    generation_defaults: Mapping[str, float]


def load_engine(config: ServeConfig, *, progress: Progress | None = None) -> Engine:
    """Load the model, compile every program, allocate the pages.

    progress(stage, done, total) is called with the stages "load" and "compile".
    Raises ModelLoadError for a bad model and ValueError for a configuration that cannot work, with the numbers.
    """
    started = time.perf_counter()
    if config.mesh.tensor_parallel != 1:
        raise ValueError(f"tensor_parallel={config.mesh.tensor_parallel}: this build runs on one device; set it to 1")
    cache_folder = use_compile_cache(config.engine.compile_cache)
    checkpoint = open_checkpoint(default_model_path() if config.model == "default" else config.model)
    tokenizer = load_tokenizer(checkpoint)
    config = resolve(config, checkpoint)
    layout, limits = _layout(config, checkpoint.config), _limits(config, checkpoint.config)
    statics = StepStatics(checkpoint.config, layout, config.engine.implementation)
    specs = llama.param_specs(checkpoint.config)
    params = load_params(checkpoint, specs, config.dtype, progress)
    loaded = time.perf_counter()
    registry = Registry(statics, config.scheduler, limits, config.dtype)
    registry.compile_all(progress, threads=os.cpu_count() or 1)
    compiled = time.perf_counter()
    memory = MemoryPlan(
        weights=nbytes(specs, config.dtype),
        pages=limits.num_pages * checkpoint.config.num_layers * layout.page_bytes,
        temporaries=registry.temp_bytes,
        budget=device_budget(),
    )
    memory.check()
    executor = DeviceExecutor(registry, params, limits, config.scheduler.max_num_seqs)
    metrics = EngineMetrics(max_num_seqs=config.scheduler.max_num_seqs)
    metrics.info = {"block_size": str(limits.page_size), "num_gpu_blocks": str(limits.usable_pages)}
    metrics.model_load_seconds.set(loaded - started)
    metrics.compile_seconds.inc(compiled - loaded, "warm_up")
    scheduler = Scheduler(config.scheduler, limits, enable_prefix_caching=config.cache.enable_prefix_caching)
    core = EngineCore(scheduler, executor, overlap=config.engine.overlap, metrics=metrics)
    executor.warm_up()
    return Engine(
        core=core,
        executor=executor,
        tokenizer=tokenizer,
        chat_template=_chat_template(config, tokenizer),
        info=ModelInfo(
            name=config.server.served_model_name or _model_name(checkpoint, config),
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            limits=limits,
        ),
        config=config,
        metrics=metrics,
        report={
            "device": str(jax.devices()[0]),
            "dtype": config.dtype,
            "programs": len(registry),
            "compile_cache": cache_folder,
            "load_seconds": loaded - started,
            "compile_seconds": compiled - loaded,
            "ready_seconds": time.perf_counter() - started,
            **dataclasses.asdict(memory),
        },
        generation_defaults=checkpoint.generation_defaults,
    )


def resolve(config: ServeConfig, checkpoint: Checkpoint) -> ServeConfig:
    """`config` with every "auto" replaced by the value for this machine and model."""
    model = checkpoint.config
    dtype = auto_dtype() if config.dtype == "auto" else config.dtype
    page_size = config.cache.page_size or _PAGE_SIZES.get(jax.default_backend(), 16)
    config = dataclasses.replace(config, dtype=dtype, cache=dataclasses.replace(config.cache, page_size=page_size))
    max_model_len = config.scheduler.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(f"{max_model_len=} is above the model's {model.max_position_embeddings} positions")
    num_pages = config.cache.num_pages or _auto_pages(config, model, max_model_len)
    if not config.scheduler.max_model_len:
        max_model_len = min(max_model_len, (num_pages - 1) * page_size)
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, num_pages=num_pages),
        scheduler=dataclasses.replace(config.scheduler, max_model_len=max_model_len),
    )


def auto_dtype() -> str:
    """bfloat16 where the device multiplies it fast, else float32."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words.intersection(_FAST_BFLOAT16) else "float32"


def use_compile_cache(setting: str) -> str:
    """Switch on the persistent compile cache and return its folder, "" when off.

    The folder is ours alone (0700), since what it holds is executed.
    """
    if not setting:
        return ""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "jcb" / "xla" if setting == "auto" else Path(setting).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise ValueError(
            f"compile cache {str(folder)!r} must belong to this user with mode 0700, since its content is executed; "
            "chmod 700 it or choose another with --set engine.compile_cache=FOLDER"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return str(folder)


def _layout(config: ServeConfig, model: ModelConfig) -> KVLayout:
    return KVLayout(config.dtype, model.num_kv_heads, model.head_dim, config.cache.page_size)


def _limits(config: ServeConfig, model: ModelConfig) -> Limits:
    return Limits(
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=model.vocab_size,
    )


def _auto_pages(config: ServeConfig, model: ModelConfig, max_model_len: int) -> int:
    """Pages that fit the memory given for them, at most what max_num_seqs full sequences can use."""
    page_bytes = model.num_layers * _layout(config, model).page_bytes
    useful = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.page_size) + 1
    weights = nbytes(llama.param_specs(model), config.dtype)
    return min(useful, pages_for_budget(config.cache.memory_gib, page_bytes, weights))


def _chat_template(config: ServeConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_template
    if config.chat_template:
        source = Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    return None if source is None else ChatTemplate(source, special_tokens=tokenizer.named_tokens)


def _model_name(checkpoint: Checkpoint, config: ServeConfig) -> str:
    if config.model == "default":
        return checkpoint.path.name.removesuffix(".gguf").removesuffix(".Q4_1")
    return checkpoint.path.name.removesuffix(".gguf")
