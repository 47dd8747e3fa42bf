"""A device that can be computed by hand: every test that needs an engine without a model uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import numpy as np

from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.scheduler.scheduler import Scheduler
from jcb.types import (
    MAX_LOGPROBS,
    FinishReason,
    Logprobs,
    Request,
    RequestError,
    RowKind,
    SamplingParams,
    ScheduledRow,
    Sequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)

_MASK = (1 << 61) - 1


def extend(cell: int, token_id: int) -> int:
    """What the device keeps at a position: a hash of the token and of all tokens before it."""
    return (cell * 6_364_136_223_846_793_005 + token_id * 2_654_435_761 + 1_442_695_040_888_963_407) & _MASK


def attend(cells: Iterable[int], vocab_size: int) -> int:
    """The next token: a hash of everything the device reads from the pages of the sequence."""
    return (hash(tuple(cells)) >> 7) % vocab_size


def logprob_of(cell: int) -> float:
    return -(cell % 1009) / 64.0


def pick(wanted: int, mask: np.ndarray, vocab_size: int) -> int:
    """The first id from `wanted` on, around the vocabulary, that `mask` allows."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    return (wanted + int(np.argmax(np.roll(bits, -wanted)))) % vocab_size


class CountingGrammar:
    """Allows token t behind a sum s of tokens where (s + t) % 3 == 0, ends where s % 12 == 0; needs no library.

    The sum begins at `first`. An end id is one more that is allowed where the grammar accepts.
    """

    def __init__(self, vocab_size: int, *, first: int = 1, end_ids: Iterable[int] = ()) -> None:
        self.vocab_size, self.first, self.end_ids = vocab_size, first, frozenset(end_ids)

    def start(self, held_back: frozenset[int]) -> CountingMatcher:
        return CountingMatcher(self, held_back)


class CountingMatcher:
    """One answer's sum; its error after `fails_after` tokens stands for a grammar that became too complex."""

    fails_after = 1_000

    def __init__(self, grammar: CountingGrammar, held_back: frozenset[int]) -> None:
        self.grammar, self.sum, self.tokens, self.error = grammar, grammar.first, [], None
        self._look(held_back)

    def advance(self, token_id: int, held_back: frozenset[int]) -> None:
        assert self.mask[token_id // 32] >> (token_id % 32) & 1, f"{token_id} is not allowed after {self.tokens}"
        self.tokens.append(token_id)
        self.sum += token_id
        self._look(held_back)

    def _look(self, held_back: frozenset[int]) -> None:
        self.accepts = self.sum % 3 == 0
        self.is_complete = bool(self.tokens) and self.sum % 12 == 0
        ids = {t for t in range(self.grammar.vocab_size) if (self.sum + t) % 3 == 0} - self.grammar.end_ids
        ids |= self.grammar.end_ids if self.accepts else set()
        bits = np.zeros(-(-self.grammar.vocab_size // 32) * 32, np.uint8)
        bits[list(ids - held_back or ids)] = 1
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)
        if len(self.tokens) >= self.fails_after:
            self.error = RequestError("too complex", code="grammar_failed")


def reference_guided_tokens(
    prompt: Iterable[int],
    max_tokens: int,
    grammar: CountingGrammar,
    *,
    eos_ids: Iterable[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The oracle for a request with a grammar: `eos_ids` are its only stop ids."""
    cells: list[int] = []
    for token_id in prompt:
        cells.append(extend(cells[-1] if cells else 0, token_id))
    output: list[int] = []
    held = frozenset(eos_ids if min_tokens > 0 else ())
    matcher = grammar.start(held)
    while len(output) < max_tokens:
        token_id = pick(attend(cells, grammar.vocab_size), matcher.mask, grammar.vocab_size)
        output.append(token_id)
        if token_id in eos_ids and matcher.accepts and len(output) > min_tokens:
            break
        matcher.advance(token_id, frozenset(eos_ids if len(output) < min_tokens else ()))
        if matcher.is_complete:
            break
        cells.append(extend(cells[-1], token_id))
    return output


def reference_tokens(
    prompt: Iterable[int], max_tokens: int, vocab_size: int, *, stop_ids: Iterable[int] = (), min_tokens: int = 0
) -> list[int]:
    """The oracle: what a request generates when it runs alone, with no pages at all."""
    cells: list[int] = []
    for token_id in prompt:
        cells.append(extend(cells[-1] if cells else 0, token_id))
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = attend(cells, vocab_size)
        output.append(token_id)
        if token_id in stop_ids and len(output) > min_tokens:
            break
        cells.append(extend(cells[-1], token_id))
    return output


def reference_prompt_logprobs(prompt: Iterable[int]) -> list[tuple[int, float]]:
    """(token id, logprob) of every prompt token but the first."""
    cell, entries = 0, []
    for position, token_id in enumerate(prompt):
        if position:
            entries.append((token_id, logprob_of(cell)))
        cell = extend(cell, token_id)
    return entries


def make_request(request_id: str, prompt: Iterable[int], max_tokens: int = 8, **fields: Any) -> Request:
    """A request with `fields` sorted into SamplingParams and Request by name."""
    names = ("priority", "arrival_time", "namespace", "eos_token_ids", "grammar")
    own = {name: fields.pop(name) for name in names if name in fields}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=params, max_tokens=max_tokens, **own)


class HashExecutor:
    """Runs plans on a pretended cache of pages, each slot of which holds the hash of a prefix.

    A row reads all its earlier positions through its page table, so a stale, foreign or missing page changes its
    tokens. A plan is run when it is dispatched (the device's order) and its result is kept until collected.
    Whatever a real executor must be able to rely on is checked, and what is wrong goes to `violations`.

    fails_dispatch / fails_collect: raise when true for a plan. not_finite: rows whose logits are not finite.
    wrong_token: sampled instead for the rows where it is not None.
    """

    def __init__(self, limits: Limits, *, max_num_seqs: int = 64, padding: int = 3) -> None:
        self.limits = limits
        self.max_num_seqs = max_num_seqs
        self.padding = padding
        self.violations: list[str] = []
        self.num_dispatched = 0
        self.num_resets = 0
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self._seen: WeakSet[Sequence] = WeakSet()
        self.fails_dispatch: Callable[[StepPlan], bool] = lambda plan: False
        self.fails_collect: Callable[[StepPlan], bool] = lambda plan: False
        self.not_finite: Callable[[ScheduledRow], bool] = lambda row: False
        self.wrong_token: Callable[[ScheduledRow], int | None] = lambda row: None
        self._forget()

    def _forget(self) -> None:
        self._cells: list[list[int | None]] = [[None] * self.limits.page_size for _ in range(self.limits.num_pages)]
        self._last_token: dict[int, int] = {}
        self._owner: dict[int, Sequence] = {}

    def reset(self) -> None:
        self.num_resets += 1
        self._forget()

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        self.num_dispatched += 1
        if self.keep_plans:
            self.plans.append(plan)
        self._check_plan(plan)
        if self.fails_dispatch(plan):
            raise RuntimeError("dispatch failed")
        return plan, self._run(plan)

    def collect(self, handle: tuple[StepPlan, StepResult]) -> StepResult:
        plan, result = handle
        if self.fails_collect(plan):
            raise RuntimeError("collect failed")
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        size = len(plan.rows) + self.padding
        token_ids = np.full(size, -7, np.int32)
        logprobs = np.full(size, np.nan, np.float32)
        top_ids = np.zeros((size, MAX_LOGPROBS), np.int32)
        top_logprobs = np.zeros((size, MAX_LOGPROBS), np.float32)
        finite = np.ones(size, np.bool_)
        prompt_logprobs: dict[int, list[Logprobs]] = {}
        read = [self._write(row) for row in plan.rows]  # all rows write before any attends, as a kernel does
        for index, (row, before) in enumerate(zip(plan.rows, read, strict=True)):
            cells = before + self._read(row, row.start, row.kv_len)
            if row.samples:
                wrong = self.wrong_token(row)
                token_ids[index] = self._sample(row, cells) if wrong is None else wrong
                self._last_token[row.slot] = int(token_ids[index])
                logprobs[index] = logprob_of(cells[-1])
                top_ids[index] = np.arange(MAX_LOGPROBS)
            finite[index] = not self.not_finite(row)
            if row.sequence.request.params.prompt_logprobs is not None:
                prompt_logprobs[index] = self._score(row, cells)
        return StepResult(plan.step_id, token_ids, logprobs, top_ids, top_logprobs, finite, prompt_logprobs)

    def _sample(self, row: ScheduledRow, cells: list[int]) -> int:
        wanted = attend(cells, self.limits.vocab_size)
        return wanted if row.mask is None else pick(wanted, row.mask, self.limits.vocab_size)

    def _score(self, row: ScheduledRow, cells: list[int]) -> list[Logprobs]:
        following = [*row.token_ids[1:], row.next_token]
        return [Logprobs(token, logprob_of(cells[row.start + i])) for i, token in enumerate(following)]

    def _write(self, row: ScheduledRow) -> list[int]:
        """Fill the row's cells; returns what it read of earlier steps."""
        before = self._read(row, 0, row.start)
        cell = before[-1] if before else 0
        for offset, token_id in enumerate(row.token_ids):
            cell = extend(cell, self._last_token[row.slot] if token_id == -1 else token_id)
            page, within = self._place(row, row.start + offset)
            self._cells[page][within] = cell
        return before

    def _read(self, row: ScheduledRow, start: int, stop: int) -> list[int]:
        cells = []
        for position in range(start, stop):
            page, within = self._place(row, position)
            cell = self._cells[page][within]
            if cell is None:
                self.violations.append(f"{row.sequence.request_id} reads position {position}, never written")
            cells.append(cell or 0)
        return cells

    def _place(self, row: ScheduledRow, position: int) -> tuple[int, int]:
        return row.page_table[position // self.limits.page_size], position % self.limits.page_size

    def _check_plan(self, plan: StepPlan) -> None:
        rows = plan.rows
        written = [p for row in rows for p in row.page_table[row.start // self.limits.page_size :]]
        lengths = [row.q_len for row in rows]
        rules = {
            "an empty plan was dispatched": not rows,
            "a row of no tokens": any(length < 1 for length in lengths),
            "chunks before single tokens": any(a > 1 and b == 1 for a, b in itertools.pairwise(lengths)),
            "a slot twice": len({row.slot for row in rows}) < len(rows),
            "a sequence twice": len({id(row.sequence) for row in rows}) < len(rows),
            "a slot out of range": any(not 0 <= row.slot < self.max_num_seqs for row in rows),
            "a page written by two rows": len(set(written)) < len(written),
            "a page out of range": any(not 0 < p < self.limits.num_pages for row in rows for p in row.page_table),
        }
        self.violations += [f"step {plan.step_id}: {what}" for what, broken in rules.items() if broken]
        for row in rows:
            self._check_row(row)

    def _check_row(self, row: ScheduledRow) -> None:
        owned = self._owner.get(row.slot) is row.sequence
        rules = {
            "token count": len(row.token_ids) != row.q_len,
            "page table width": len(row.page_table) != self.limits.pages_for(row.kv_len),
            "longer than the model": row.kv_len > self.limits.max_model_len,
            "unknown token in a chunk": row.q_len > 1 and -1 in row.token_ids,
            "continued in a slot of another": row.kind is RowKind.CONTINUED and not owned,
            "new a second time": row.kind is RowKind.NEW and row.sequence in self._seen,
            "resumed the first time": row.kind is RowKind.RESUMED and row.sequence not in self._seen,
            "next token": not row.samples and row.next_token < 0,
            "mask": (row.mask is not None) != (row.samples and row.sequence.request.grammar is not None),
            "pending under a grammar": row.mask is not None and -1 in row.token_ids,
        }
        self.violations += [f"{row.sequence.request_id}: {what}" for what, broken in rules.items() if broken]
        self._owner[row.slot] = row.sequence
        self._seen.add(row.sequence)


class Bench:
    """An `EngineCore` on a `HashExecutor`, and everything its requests were given."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_model_len: int = 128,
        vocab_size: int = 101,
        prefix_caching: bool = True,
        overlap: bool = True,
        **config: Any,
    ) -> None:
        self.limits = Limits(
            page_size=page_size, num_pages=num_pages, max_model_len=max_model_len, vocab_size=vocab_size
        )
        self.config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16} | config)
        self.executor = HashExecutor(self.limits, max_num_seqs=self.config.max_num_seqs)
        self.scheduler = Scheduler(self.config, self.limits, enable_prefix_caching=prefix_caching)
        self.now = 0.0
        self.core = EngineCore(self.scheduler, self.executor, overlap=overlap, clock=lambda: self.now)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[Logprobs]] = {}
        self.ends: dict[str, SequenceOutput] = {}
        self.last: list[SequenceOutput] = []

    def add(self, request_id: str, prompt: Iterable[int], max_tokens: int = 8, **fields: Any) -> None:
        request = make_request(request_id, prompt, max_tokens, **fields)
        self.core.add(request)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.prompt_logprobs[request_id] = []

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        """Note what was delivered; nothing may follow an end."""
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} was given something after its end"
            self.tokens[output.request_id] += output.token_ids
            self.prompt_logprobs[output.request_id] += output.prompt_logprobs
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def abort(self, request_id: str) -> None:
        output = self.core.abort(request_id)
        self.take([] if output is None else [output])

    def step(self) -> None:
        self.last = self.core.step()
        self.take(self.last)
        self.scheduler.check_integrity()
        assert not self.executor.violations, self.executor.violations

    def run(self, max_steps: int = 5_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_running} run and {self.scheduler.num_waiting} wait for ever")

    def expected(self, request_id: str) -> list[int]:
        """The oracle's answer."""
        request = self.requests[request_id]
        params = request.params
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        room = self.limits.max_model_len - len(request.prompt_token_ids)
        if isinstance(request.grammar, CountingGrammar):
            return reference_guided_tokens(
                request.prompt_token_ids,
                min(request.max_tokens, room),
                request.grammar,
                eos_ids=request.eos_token_ids,
                min_tokens=params.min_tokens,
            )
        return reference_tokens(
            request.prompt_token_ids,
            min(request.max_tokens, room),
            self.limits.vocab_size,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
        )

    def check(self, *request_ids: str) -> None:
        """These requests (default: all) have ended well with the oracle's answer."""
        for request_id in request_ids or self.requests:
            assert self.ends[request_id].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), request_id
            assert self.tokens[request_id] == self.expected(request_id), request_id

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]
