"""The default model for tests: weights read once, programs compiled once a shape, a new scheduler for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.config import Limits, SchedulerConfig
from jcb.engine.compile_cache import use_compile_cache
from jcb.engine.core import EngineCore
from jcb.engine.executor import DeviceExecutor
from jcb.models import llama
from jcb.scheduler.scheduler import Scheduler
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.types import FinishReason, Logprobs, Request, SamplingParams
from jcb.weights.load import load_params
from jcb.weights.shipped import shipped_config
from pallas_kernels import native
from pallas_kernels.layout import KVLayout

EOS = 2


@dataclass
class Answer:
    """Everything one request got."""

    token_ids: list[int]
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs]
    finish_reason: FinishReason | None = None
    num_cached: int = 0


@cache
def checkpoint():
    return open_checkpoint(default_model_path())


@cache
def model(dtype: str, weights: str):
    """The model's config. weights: "auto" is as shipped where a server would keep them so here."""
    if weights == "auto":
        weights = "as-shipped" if dtype == "float32" and native.available() else "dense"
    return shipped_config(checkpoint()) if weights == "as-shipped" else checkpoint().config


@cache
def params(dtype: str, weights: str = "auto"):
    return load_params(checkpoint(), llama.param_specs(model(dtype, weights)), dtype)


@cache
def executor(
    page_size: int = 16,
    max_num_seqs: int = 32,
    budget: int = 512,
    dtype: str = "float32",
    weights: str = "auto",
    activations: str = "full",
    kv_dtype: str = "",
) -> DeviceExecutor:
    use_compile_cache("auto")
    config = dataclasses.replace(model(dtype, weights), activations=activations)
    limits = Limits(
        page_size=page_size, num_pages=8192 // page_size + 1, max_model_len=2048, vocab_size=config.vocab_size
    )
    statics = StepStatics(config, KVLayout("cpu", kv_dtype or dtype, config.num_kv_heads, config.head_dim, page_size))
    registry = Registry(
        statics, SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget), limits, dtype
    )
    registry.compile_all()
    device = DeviceExecutor(registry, params(dtype, weights), limits, max_num_seqs)
    device.warm_up()
    return device


class Engine:
    """A fresh scheduler and core over a shared executor."""

    def __init__(
        self, device: DeviceExecutor, *, overlap: bool = True, prefix_caching: bool = False, **scheduler
    ) -> None:
        self.device = device
        registry = device.registry
        budget = max(shape.num_tokens for shape in registry.shapes.prefill)
        slots = max(shape.num_rows for shape in registry.shapes.decode)
        settings = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "run_timeout": 1e6, "queue_timeout": 1e6}
        settings["max_queued"] = 10_000
        settings["max_queued_tokens"] = 10_000_000
        device.reset()
        self.scheduler = Scheduler(
            SchedulerConfig(**{**settings, **scheduler}), device._limits, enable_prefix_caching=prefix_caching
        )
        self.core = EngineCore(self.scheduler, device, overlap=overlap)
        self.steps = 0

    def run(self, requests: Iterable[Request]) -> dict[str, Answer]:
        """Add all, step until idle, check the books."""
        answers: dict[str, Answer] = {}
        for request in requests:
            answers[request.request_id] = Answer([], [], [])
            self.core.add(request)
        while self.core.has_work:
            self.steps += 1
            for output in self.core.step():
                answer = answers[output.request_id]
                assert answer.finish_reason is None, "an output after the end"
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs
                answer.prompt_logprobs += output.prompt_logprobs
                answer.finish_reason = output.finish_reason
                answer.num_cached = output.num_cached_tokens
                assert output.error is None, output.error
        self.scheduler.check_integrity()
        assert all(answer.finish_reason for answer in answers.values())
        return answers


def request(name: str, prompt: Iterable[int], *, seed: int = 0, max_tokens: int = 48, **params) -> Request:
    """A greedy request with the model's end token, unless told otherwise."""
    settings = {"temperature": 0.0, "logprobs": 5, "max_tokens": max_tokens, **params}
    eos = () if settings.get("ignore_eos") else (EOS,)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**settings),
        eos_token_ids=eos,
        seed=seed,
        max_tokens=max_tokens,
    )


def logprob_array(answer: Answer) -> np.ndarray:
    return np.array([entry.logprob for entry in answer.logprobs])
