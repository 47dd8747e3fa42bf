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
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import Checkpoint, open_checkpoint
from jcb.config import Limits, ModelConfig, ServeConfig
from jcb.engine.admission import ModelInfo
from jcb.engine.compile_cache import use_compile_cache
from jcb.engine.core import EngineCore, Recorder
from jcb.engine.device import local_device
from jcb.engine.executor import DeviceExecutor
from jcb.engine.resolve import as_kept, limits_of, plan_memory, resolve
from jcb.metrics import EngineMetrics
from jcb.models import llama
from jcb.models.presets import PREFIX
from jcb.scheduler.scheduler import Scheduler
from jcb.sharding import tensor_parallel
from jcb.steps.compile_guard import CompileGuard
from jcb.steps.compiler_options import set_libtpu_args
from jcb.steps.lowered import LoweredCache
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.text.chat import ChatTemplate, load_chat_template
from jcb.text.tokenizer import Tokenizer, load_tokenizer
from jcb.weights.load import load_params
from jcb.weights.shipped import shipped_config

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Engine:
    """A loaded model with everything the front needs; `config` has no "auto" left."""

    core: EngineCore
    executor: DeviceExecutor
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    info: ModelInfo
    config: ServeConfig
    model: ModelConfig
    platform: str
    metrics: EngineMetrics
    report: Mapping[str, Any]
    generation_defaults: Mapping[str, float]


def load_engine(config: ServeConfig, *, progress: Progress | None = None) -> Engine:
    """Load the model, compile every program, allocate the pages.

    progress(stage, done, total) is called with the stages "load" and "compile".
    Raises ModelLoadError for a bad model and ValueError for a configuration that cannot work, with the numbers.
    """
    started = time.perf_counter()
    _refuse_shape(config.model)
    set_libtpu_args(os.environ)
    record = _recorder(config)
    compile_cache = use_compile_cache(config.engine.compile_cache)
    checkpoint = open_checkpoint(default_model_path() if config.model == "default" else config.model)
    tokenizer = load_tokenizer(checkpoint)
    device, model = local_device(), shipped_config(checkpoint)
    placement = tensor_parallel(config.mesh.tensor_parallel, model)
    config = resolve(config, model, device, placement.num_devices)
    model = as_kept(config, model)
    plan_memory(config, model, 0, device, placement.num_devices).check()  # before minutes of compiling
    params = load_params(checkpoint, llama.param_specs(model), config.dtype, progress, placement)
    loaded = time.perf_counter()
    statics = StepStatics.of(config, model, device.platform)
    limits = limits_of(config, model.vocab_size)
    kept = LoweredCache.beside(compile_cache) if device.platform == "cpu" and placement.mesh is None else None
    registry = Registry(statics, config.scheduler, limits, config.dtype, placement, kept)
    registry.compile_all(progress, threads=os.cpu_count() or 1)
    compiled = time.perf_counter()
    memory = plan_memory(config, model, registry.temp_bytes, device, placement.num_devices)
    memory.check()
    metrics = _metrics(config, loaded - started, compiled - loaded)
    metrics.programs.set(len(registry))
    metrics.weight_bytes.set(memory.weights)
    metrics.page_bytes.set(memory.pages)
    guard = CompileGuard(metrics.compiles_after_ready.inc)
    executor = DeviceExecutor(registry, params, limits, config.scheduler.max_num_seqs, guard, metrics)
    executor.warm_up()
    scheduler = Scheduler(config.scheduler, limits, enable_prefix_caching=config.cache.enable_prefix_caching)
    recorder = record(config, model, device.platform, registry.shapes)
    return Engine(
        core=EngineCore(scheduler, executor, overlap=config.engine.overlap, metrics=metrics, recorder=recorder),
        executor=executor,
        tokenizer=tokenizer,
        chat_template=load_chat_template(tokenizer, _template_source(config)),
        info=_info(checkpoint, config, limits),
        config=config,
        model=model,
        platform=device.platform,
        metrics=metrics,
        report={
            "device": str(jax.devices()[0]),
            "programs": len(registry),
            "compile_cache": compile_cache,
            "load_seconds": loaded - started,
            "compile_seconds": compiled - loaded,
            "ready_seconds": time.perf_counter() - started,
            **_precision(config),
            **dataclasses.asdict(memory),
        },
        generation_defaults=checkpoint.generation_defaults,
    )


def _refuse_shape(model: str) -> None:
    """A preset has nothing to load."""
    if model.startswith(PREFIX):
        raise ValueError(
            f"model {model!r} is a shape without weights, for planning and compiling only; "
            "give --model PATH, a GGUF file or a Hugging Face folder"
        )


def _recorder(config: ServeConfig) -> Callable[..., Recorder | None]:
    """What starts the recorder once sizes are known; a file that cannot be written is told before anything loads."""
    if not config.engine.record:
        return lambda *sizes: None
    from jcb.engine.record import start_recorder
    from jcb.recording.recorder import RecordingFile

    return partial(start_recorder, RecordingFile(config.engine.record))


def _info(checkpoint: Checkpoint, config: ServeConfig, limits: Limits) -> ModelInfo:
    return ModelInfo(
        name=config.server.served_model_name or _model_name(checkpoint, config),
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        limits=limits,
    )


def _metrics(config: ServeConfig, load_seconds: float, compile_seconds: float) -> EngineMetrics:
    metrics = EngineMetrics(max_num_seqs=config.scheduler.max_num_seqs)
    metrics.info = {"block_size": str(config.cache.page_size), "num_gpu_blocks": str(config.cache.num_pages - 1)}
    metrics.model_load_seconds.set(load_seconds)
    metrics.compile_seconds.inc(compile_seconds, "warm_up")
    return metrics


def _template_source(config: ServeConfig) -> str:
    """What the file that the operator named holds, or ""."""
    if not config.chat_template:
        return ""
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template {config.chat_template!r} cannot be read: {error}") from error


def _model_name(checkpoint: Checkpoint, config: ServeConfig) -> str:
    if config.model == "default":
        return checkpoint.path.name.removesuffix(".gguf").removesuffix(".Q4_1")
    return checkpoint.path.name.removesuffix(".gguf")


def _precision(config: ServeConfig) -> dict[str, str]:
    """What a resolved configuration computes in and keeps numbers as."""
    kept = {"weights_kept": config.weights, "kv_dtype": config.cache.kv_dtype}
    return {"dtype": config.dtype, "activations": config.activations} | kept
