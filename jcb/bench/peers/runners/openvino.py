"""OpenVINO GenAI: its ContinuousBatchingPipeline on the GGUF file."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jcb.bench.peers.runners.protocol import Stepper, serve, versions


class _OpenVino:
    """Handles are kept until their last token is read: a request whose handle is dropped is dropped silently."""

    def __init__(self, genai: Any, tensor: Any, numpy: Any, pipeline: Any) -> None:
        self._genai, self._tensor, self._numpy, self._pipeline = genai, tensor, numpy, pipeline
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, index: int, prompt: Sequence[int], output: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = output
        config.min_new_tokens = output
        config.ignore_eos = True
        config.do_sample = False
        ids = self._tensor(self._numpy.array([prompt], self._numpy.int64))
        self._handles[index] = self._pipeline.add_request(self._next_id, ids, config)
        self._next_id += 1
        self._left[index] = output

    def step(self) -> Sequence[tuple[int, Sequence[int]]]:
        if not self._pipeline.has_non_finished_requests():
            raise RuntimeError(f"the pipeline has ended with tokens of {len(self._left)} requests missing")
        self._pipeline.step()
        gained = []
        for index, handle in list(self._handles.items()):
            if not handle.can_read():
                continue
            ids = [token for output in handle.read().values() for token in output.generated_ids]
            gained.append((index, ids))
            self._left[index] -= len(ids)
            if self._left[index] <= 0:
                del self._left[index], self._handles[index]
        return gained


def load(settings: dict[str, Any]) -> tuple[Stepper, dict[str, Any]]:
    """settings: gguf, max_num_seqs, max_num_batched_tokens, cache_gib, properties (of the CPU device)."""
    import numpy

    genai = importlib.import_module("openvino_genai")
    openvino = importlib.import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
    scheduler.cache_size = settings["cache_gib"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = settings["properties"] | {"INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(settings["gguf"], scheduler, "CPU", properties)
    told = {
        "versions": versions("openvino-genai", "openvino"),
        "precision": ", ".join(f"{name} {value}" for name, value in settings["properties"].items()),
    }
    return _OpenVino(genai, openvino.Tensor, numpy, pipeline), told


if __name__ == "__main__":
    serve(load)
