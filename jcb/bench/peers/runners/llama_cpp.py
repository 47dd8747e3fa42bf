"""llama.cpp: one `llama_decode` a step over decoding sequences and prompt chunks together, as its own server does."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jcb.bench.peers.runners.protocol import Stepper, serve, versions


@dataclass
class _Row:
    """One request in a sequence slot. fed: tokens of it that are in the cache."""

    index: int
    prompt: Sequence[int]
    left: int
    slot: int
    fed: int = 0
    last: int = -1
    at: int = field(default=-1)  # where in the batch its logits are


class _LlamaCpp:
    def __init__(self, api: Any, numpy: Any, context: Any, vocab_size: int, seats: int, tokens: int) -> None:
        self._api, self._numpy, self._context, self._vocab_size = api, numpy, context, vocab_size
        self._memory = api.llama_get_memory(context)
        self._batch = api.llama_batch_init(tokens, 0, 1)
        self._tokens = tokens
        self._free = list(range(seats))
        self._rows: list[_Row] = []
        self._waiting: list[tuple[int, Sequence[int], int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, index: int, prompt: Sequence[int], output: int) -> None:
        self._waiting.append((index, prompt, output))

    def step(self) -> Sequence[tuple[int, Sequence[int]]]:
        while self._waiting and self._free:
            index, prompt, output = self._waiting.pop(0)
            self._rows.append(_Row(index, prompt, output, self._free.pop()))
        self._fill()
        if code := self._api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return self._take()

    def _fill(self) -> None:
        """Decoding rows first, then prompts, up to the batch's size."""
        self._batch.n_tokens = 0
        for row in self._rows:
            row.at = -1
            if row.last >= 0:
                row.at = self._put(row.last, row.fed, row.slot, wants_logits=True)
                row.fed += 1
        for row in self._rows:
            if row.last >= 0:
                continue
            room = self._tokens - self._batch.n_tokens
            for token in row.prompt[row.fed : row.fed + room]:
                row.fed += 1
                is_end = row.fed == len(row.prompt)
                at = self._put(token, row.fed - 1, row.slot, wants_logits=is_end)
                row.at = at if is_end else -1

    def _put(self, token: int, position: int, slot: int, *, wants_logits: bool) -> int:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = slot, wants_logits
        batch.n_tokens += 1
        return at

    def _take(self) -> list[tuple[int, list[int]]]:
        """The likeliest token of every row that has logits; rows that are done leave."""
        gained = []
        for row in [row for row in self._rows if row.at >= 0]:
            logits = self._api.llama_get_logits_ith(self._context, row.at)
            row.last = int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
            row.left -= 1
            gained.append((row.index, [row.last]))
            if row.left == 0:
                self._api.llama_memory_seq_rm(self._memory, row.slot, -1, -1)
                self._free.append(row.slot)
                self._rows.remove(row)
        return gained


def load(settings: dict[str, Any]) -> tuple[Stepper, dict[str, Any]]:
    """settings: gguf, max_num_seqs, max_model_len, max_num_batched_tokens, label."""
    import numpy

    api = importlib.import_module("llama_cpp")
    api.llama_backend_init()
    options = api.llama_model_default_params()
    if hasattr(options, "use_extra_bufts"):
        options.use_extra_bufts = settings["extra_buffers"]
    model = api.llama_model_load_from_file(settings["gguf"].encode(), options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
    context = api.llama_init_from_model(model, _context_options(api, settings))
    if not context:
        raise RuntimeError("llama.cpp cannot make a context of that size")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    stepper = _LlamaCpp(api, numpy, context, vocab_size, settings["max_num_seqs"], settings["max_num_batched_tokens"])
    system = api.llama_print_system_info().decode()
    told = {"versions": versions("llama-cpp-python"), "precision": settings["label"], "notes": " ".join(system.split())}
    return stepper, told


def _context_options(api: Any, settings: dict[str, Any]) -> Any:
    """Room for every sequence at its longest, in one pool."""
    options = api.llama_context_default_params()
    options.n_ctx = settings["max_num_seqs"] * settings["max_model_len"]
    options.n_batch = settings["max_num_batched_tokens"]
    options.n_ubatch = 512
    options.n_seq_max = settings["max_num_seqs"]
    options.n_threads = options.n_threads_batch = settings["threads"]
    if hasattr(options, "kv_unified"):
        options.kv_unified = settings["unified"]
    return options


if __name__ == "__main__":
    serve(load)
