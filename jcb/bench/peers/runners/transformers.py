"""Transformers: its continuous batching manager, which steps in a thread of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jcb.bench.peers.runners.protocol import Stepper, serve, versions

_PAGE = 16
_NO_TOKEN = -1


class _Transformers:
    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._known: dict[str, tuple[int, int]] = {}  # request id → the job's number and its tokens so far
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    def add(self, index: int, prompt: Sequence[int], output: int) -> None:
        name = f"job-{self._next_id}"
        self._next_id += 1
        self._known[name] = (index, 0)
        accepted = self._manager.add_request(
            list(prompt), request_id=name, max_new_tokens=output, streaming=True, eos_token_id=_NO_TOKEN
        )
        if accepted is None:
            raise RuntimeError("the manager takes no requests")

    def step(self) -> Sequence[tuple[int, Sequence[int]]]:
        """What has come since; waits for something, but not so long that arrivals would be late."""
        gained = []
        result = self._manager.get_result(timeout=0.02)
        while result is not None:
            if result.error:
                raise RuntimeError(result.error)
            index, seen = self._known[result.request_id]
            if len(result.generated_tokens) > seen:
                gained.append((index, list(result.generated_tokens[seen:])))
            self._known[result.request_id] = (index, len(result.generated_tokens))
            if result.is_finished():
                del self._known[result.request_id]
            result = None if self._manager.output_router.output_queue.empty() else self._manager.get_result(timeout=0.0)
        if not gained and not self._manager.is_running():
            raise RuntimeError(f"its thread has ended: {self._manager.background_thread_status.fatal_error}")
        return gained


def load(settings: dict[str, Any]) -> tuple[Stepper, dict[str, Any]]:
    """settings: folder, dtype, max_model_len, max_num_seqs, max_num_batched_tokens."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(settings["threads"])
    torch.set_num_interop_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["folder"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
    ).eval()
    batching = transformers.ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=settings["max_num_seqs"] * -(-settings["max_model_len"] // _PAGE),
        max_batch_tokens=settings["max_num_batched_tokens"],
        max_requests_per_batch=settings["max_num_seqs"],
        allow_block_sharing=False,
    )
    sampling = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)
    manager.start()
    told = {
        "versions": versions("transformers", "torch"),
        "precision": f"weights, activations and KV {settings['dtype']}, sdpa",
    }
    return _Transformers(manager), told


if __name__ == "__main__":
    serve(load)
