"""The scheduler: requests in, one `StepPlan` a step out, `StepResult`s back in.

Each step is decided anew, token by token and not request by request: first one token for every sequence that is
generating, then chunks of prompts, then new arrivals while budget, slots and pages last. Sequences run in order of
precedence (oldest first); when pages run short the youngest gives up its own and is computed again later.
The oldest running sequence therefore always advances, and every admitted request ends.
"""

from __future__ import annotations

import bisect
import heapq
from operator import attrgetter

from jcb.config import Limits, SchedulerConfig
from jcb.scheduler import policy, results
from jcb.scheduler.draft import Draft
from jcb.scheduler.heap import KeyedHeap
from jcb.scheduler.pages import PageLedger
from jcb.scheduler.record import Record
from jcb.types import (
    FinishReason,
    Request,
    RequestError,
    RowKind,
    ScheduledRow,
    SequenceOutput,
    SequenceStatus,
    StepPlan,
    StepResult,
)

_by_order = attrgetter("order")


class Scheduler:
    """Decides who runs. One thread only; no method blocks; no work grows with the number of waiting requests.

    Calls alternate: `schedule` makes a plan, which is dispatched; `update` or `fail` takes in what became of it.
    One more plan may be made before the result of the last one is known; its decoding rows then carry the
    token id -1. Rows of a sequence that ended meanwhile are dropped; a sequence that was preempted meanwhile
    still gets its token, once.
    """

    def __init__(
        self, config: SchedulerConfig, limits: Limits, *, enable_prefix_caching: bool, root: bytes | None = None
    ) -> None:
        self._config = config
        self._limits = limits
        self._pages = PageLedger(limits, enable_prefix_caching=enable_prefix_caching, root=root)
        self._reserves = config.admission != "paged"
        self._chunk = min(config.max_prefill_chunk or config.max_num_batched_tokens, config.max_num_batched_tokens)
        self._spare_pages = limits.usable_pages // 100  # left free by admissions while others run, against thrashing
        self._live: dict[str, Record] = {}
        self._running: list[Record] = []  # by order; each holds a slot
        self._waiting = KeyedHeap()  # by order; none holds a slot or a page
        self._deadlines = KeyedHeap()  # by time
        self._suspects: list[Record] = []  # by order; were in a failed step and must pass a step alone
        self._slots = list(range(config.max_num_seqs))  # a heap: the lowest free slot is taken, the batch stays dense
        self._in_flight: dict[int, StepPlan] = {}
        self._num_steps = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._num_waiting_tokens = 0

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. RequestError 400 when it can never be served, 429 when the queue is full."""
        if request.request_id in self._live:
            raise RequestError("a request with this id is being served", param="request_id", code="duplicate_request")
        policy.check_can_ever_fit(request, self._limits)
        self._check_queue(len(request.prompt_token_ids))
        self._num_added += 1
        record = Record(
            request,
            order=policy.precedence(self._config, request, self._num_added),
            limit=policy.generation_limit(request, self._limits),
            stop_ids=policy.stop_ids(request),
        )
        self._live[request.request_id] = record
        self._deadlines.push(request.request_id, now + self._config.queue_timeout)
        self._wait(record)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> SequenceOutput | None:
        """End a request now, whatever its state; None when it is unknown or has ended."""
        record = self._live.get(request_id)
        return None if record is None else self._finish(record, reason)

    def expire(self, now: float) -> list[SequenceOutput]:
        """End the requests that waited or ran too long."""
        outputs = []
        while (due := self._deadlines.first()) is not None and due[0] <= now:
            record = self._live[due[1]]
            started = record.first_scheduled_time is not None
            error = results.run_timeout(self._config) if started else results.queue_timeout(self._config)
            outputs.append(self._finish(record, FinishReason.ERROR, error))
        return outputs

    # ---- one step

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Without rows there is nothing to run until a result comes in or a request does."""
        draft = Draft(self._config.max_num_batched_tokens)
        if self._suspects:
            self._plan_suspect(draft)
        else:
            self._force_preemption(draft)
            self._plan_running(draft)
            if not draft.preempted:
                self._admit(draft)
        return self._commit(draft, now)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in what a step produced. A plan that is not in flight (seen before, or discarded) yields nothing."""
        if self._in_flight.pop(plan.step_id, None) is None:
            return []
        outputs = []
        sampled, finite = result.token_ids.tolist(), result.finite.tolist()
        for index, row in enumerate(plan.rows):
            record = self._live.get(row.sequence.request.request_id)
            if record is None or record is not row.sequence:
                continue  # ended meanwhile
            if row.samples:
                record.num_pending -= 1
            error = results.row_error(sampled[index], finite[index], row.samples, self._limits.vocab_size)
            if error is not None:
                self._pages.condemn(record)
                outputs.append(self._finish(record, FinishReason.ERROR, error))
                continue
            if self._suspects and row.kv_len >= record.must_prove:
                self._clear(record)
            output = self._take(record, row, index, sampled[index], result, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: StepPlan, error: Exception, now: float) -> list[SequenceOutput]:
        """A step raised and the device's cache is lost: every plan in flight is void, everything starts over.

        The sequences of the plan become suspects. Each runs alone until it has passed the length it had in the
        failed step; one that fails alone ends with an error. A sequence has to prove at least one token more each
        time it is in a failed step, so even steps that fail with nobody to blame end.
        """
        if plan.step_id not in self._in_flight:
            return []
        for lost in self._in_flight.values():
            for row in lost.rows:
                row.sequence.num_pending = 0
        self._in_flight.clear()
        for record in tuple(self._running):
            self._evacuate(record)
        self._pages.clear()
        involved = [
            (row, record) for row in plan.rows if (record := self._live.get(row.sequence.request_id)) is row.sequence
        ]
        if len(plan.rows) == 1 and involved and involved[0][1] in self._suspects:
            return [self._finish(involved[0][1], FinishReason.ERROR, results.step_failed(error))]
        for row, record in involved:
            record.must_prove = max(record.must_prove + 1, row.kv_len)
            if record not in self._suspects:
                bisect.insort(self._suspects, record, key=_by_order)
        return []

    # ---- deciding a step

    def _plan_running(self, draft: Draft) -> None:
        """Rows for sequences that hold slots: one token each for those that generate, then chunks."""
        unfinished = []
        for record in tuple(self._running):
            if record.slot < 0:
                continue  # preempted a moment ago for an older one
            if record.num_tokens - record.num_computed > 1:
                unfinished.append(record)
            elif record.num_generated < record.limit:
                self._plan_row(draft, record, 1)
        for record in unfinished:
            if record.slot >= 0:
                self._plan_chunk(draft, record)

    def _plan_chunk(self, draft: Draft, record: Record) -> None:
        left = record.num_tokens - record.num_computed
        q_len = min(left, self._chunk, draft.budget)
        if q_len > 0:
            self._plan_row(draft, record, q_len)
        draft.promised += max(self._limits.pages_for(record.num_tokens) - len(record.pages), 0)

    def _plan_row(self, draft: Draft, record: Record, q_len: int) -> None:
        """Give the record a row if its pages can be had, preempting younger ones for them."""
        missing = self._limits.pages_for(record.num_computed + q_len) - len(record.pages)
        if missing > 0:
            while self._pages.num_available < missing:
                victim = self._victim(record)
                if victim is None:
                    return  # it keeps what it has and waits; an older one can take that
                self._preempt(draft, victim)
            self._pages.grow(record, missing)
        draft.add(record, q_len)

    def _victim(self, record: Record) -> Record | None:
        """Who gives up pages for `record`: the youngest, and only if it is younger. A suspect may ask anybody."""
        if self._suspects:
            return next((other for other in reversed(self._running) if other is not record), None)
        return None if self._running[-1] is record else self._running[-1]

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, in their order, while slots, budget and pages last."""
        static = self._config.admission == "static"
        if static and self._running:
            return
        while self._slots and (draft.budget > 0 or static) and (first := self._waiting.first()) is not None:
            record = self._live[first[1]]
            if record.num_pending or not self._start(record, draft):
                return
            self._plan_chunk(draft, record)

    def _start(self, record: Record, draft: Draft) -> bool:
        """Give a waiting record a slot and its cached pages; False when what it needs is not available."""
        tokens = len(record.request.prompt_token_ids) + record.limit if self._reserves else record.num_tokens
        wanted = self._limits.pages_for(tokens)
        hits = self._pages.match(record)
        spare = self._spare_pages + draft.promised if self._running else 0
        if self._pages.price(hits, wanted) + spare > self._pages.num_available:
            return False
        self._pages.adopt(record, hits)
        if self._reserves:
            self._pages.grow(record, wanted - len(hits))
        self._leave_queue(record)
        record.status = SequenceStatus.RUNNING
        record.slot = heapq.heappop(self._slots)
        record.is_fresh = True
        record.num_generated_before = record.num_generated
        if not record.was_scheduled:
            record.num_cached = record.num_computed
        bisect.insort(self._running, record, key=_by_order)
        return True

    def _plan_suspect(self, draft: Draft) -> None:
        """The first suspect alone, once nothing is in flight."""
        if self._in_flight:
            return
        record = self._suspects[0]
        while record.slot < 0 and not self._start(record, draft):
            self._preempt(draft, self._running[-1])
        self._plan_chunk(draft, record)

    def _force_preemption(self, draft: Draft) -> None:
        """`preempt_every`: the youngest that gained a token since it was admitted, so that all still end."""
        every = self._config.preempt_every
        if every and self._num_steps % every == every - 1:
            gained = (r for r in reversed(self._running) if r.num_generated > r.num_generated_before)
            victim = next(gained, None)
            if victim is not None:
                self._preempt(draft, victim)

    def _commit(self, draft: Draft, now: float) -> StepPlan:
        """Turn the decision into a plan and advance the records by it."""
        ones = [record for record, q_len in draft.rows.items() if q_len == 1]
        chunks = [record for record, q_len in draft.rows.items() if q_len > 1]
        self._num_steps += 1
        rows = tuple([self._advance(record, draft.rows[record], now) for record in ones + chunks])
        plan = StepPlan(self._num_steps, rows, tuple(draft.preempted))
        if rows:
            self._in_flight[plan.step_id] = plan
        return plan

    def _advance(self, record: Record, q_len: int, now: float) -> ScheduledRow:
        start, num_tokens = record.num_computed, record.num_tokens
        end = start + q_len
        samples = end == num_tokens
        num_pages = self._limits.pages_for(end)
        if len(record.page_table) != num_pages:
            record.page_table = tuple(record.pages[:num_pages])
        row = ScheduledRow(
            sequence=record,
            slot=record.slot,
            start=start,
            q_len=q_len,
            kind=self._kind(record),
            samples=samples,
            token_ids=(record.token(start),) if q_len == 1 else tuple(record.tokens(start, end)),
            page_table=record.page_table,
            num_output=record.num_generated,
            next_token=-1 if samples else record.token(end),
        )
        if not record.was_scheduled:
            record.first_scheduled_time = now
            record.was_scheduled = True
            self._deadlines.push(record.request.request_id, now + self._config.run_timeout)
        record.is_fresh = False
        record.num_computed = end
        if samples:
            record.num_pending += 1
        self._pages.publish(record)
        return row

    @staticmethod
    def _kind(record: Record) -> RowKind:
        if not record.is_fresh:
            return RowKind.CONTINUED
        return RowKind.RESUMED if record.was_scheduled else RowKind.NEW

    # ---- taking in results

    def _take(
        self, record: Record, row: ScheduledRow, index: int, token_id: int, result: StepResult, now: float
    ) -> SequenceOutput | None:
        prompt_logprobs = results.fresh_prompt_logprobs(record, row, result.prompt_logprobs.get(index))
        if not row.samples:
            return results.prompt_output(record, prompt_logprobs) if prompt_logprobs else None
        record.output_token_ids.append(token_id)
        if record.first_token_time is None:
            record.first_token_time = now
        self._pages.publish(record)
        reason = policy.end_after(record, token_id)
        if reason is not None:
            self._end(record, reason)
        return results.token_output(record, token_id, results.logprobs_of(record, index, result), prompt_logprobs)

    def _finish(self, record: Record, reason: FinishReason, error: RequestError | None = None) -> SequenceOutput:
        """End a sequence for a reason other than its tokens."""
        self._end(record, reason)
        return SequenceOutput(record.request_id, finish_reason=reason, error=error, num_cached_tokens=record.num_cached)

    # ---- changes of state

    def _wait(self, record: Record) -> None:
        record.status = SequenceStatus.WAITING
        self._waiting.push(record.request_id, record.order)
        self._num_waiting_tokens += len(record.request.prompt_token_ids)

    def _leave_queue(self, record: Record) -> None:
        self._waiting.discard(record.request_id)
        self._num_waiting_tokens -= len(record.request.prompt_token_ids)

    def _preempt(self, draft: Draft, record: Record) -> None:
        """Take the record's pages and slot for others; it is computed again later, its outputs stay."""
        draft.withdraw(record)
        draft.preempted.append(record.request_id)
        record.num_preemptions += 1
        self._num_preemptions += 1
        self._evacuate(record)

    def _evacuate(self, record: Record) -> None:
        self._leave_slot(record)
        self._wait(record)

    def _leave_slot(self, record: Record) -> None:
        self._pages.drop(record)
        self._running.remove(record)
        heapq.heappush(self._slots, record.slot)
        record.slot = -1

    def _clear(self, record: Record) -> None:
        """No longer a suspect, if it was one."""
        if record in self._suspects:
            self._suspects.remove(record)

    def _end(self, record: Record, reason: FinishReason) -> None:
        """Free all that the record holds and forget it."""
        if record.status is SequenceStatus.RUNNING:
            self._leave_slot(record)
        else:
            self._leave_queue(record)
        self._clear(record)
        self._deadlines.discard(record.request_id)
        del self._live[record.request_id]
        record.status = SequenceStatus.FINISHED
        record.finish_reason = reason

    def _check_queue(self, num_tokens: int) -> None:
        waiting, tokens = len(self._waiting), self._num_waiting_tokens
        too_many = waiting >= policy.max_queued(self._config)
        too_long = waiting > 0 and tokens + num_tokens > policy.max_queued_tokens(self._config, self._limits)
        if too_many or too_long:
            raise policy.queue_full(waiting, tokens)

    # ---- looking in

    def stats(self) -> dict[str, int]:
        """Numbers for metrics: sequences, pages, prefix-cache tokens, preemptions so far."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "preemptions": self._num_preemptions,
            **self._pages.stats(),
        }

    def check_integrity(self) -> None:
        """Assert that slots, pages and queues agree with the records."""
        self._pages.check_integrity(self._running)
        slots = [record.slot for record in self._running]
        assert sorted(slots + self._slots) == list(range(self._config.max_num_seqs)), "a slot is lost or taken twice"
        assert self._running == sorted(self._running, key=_by_order), "running is out of order"
        assert len(self._live) == len(self._running) + len(self._waiting), "a live sequence is nowhere"
        for name, record in self._live.items():
            waits = name in self._waiting
            assert waits == (record.status is SequenceStatus.WAITING), f"{name} has the wrong status"
            assert not (waits and (record.pages or record.slot >= 0)), f"{name} waits and holds pages or a slot"
            assert record.num_pending >= 0 and name in self._deadlines
        waiting = [r for name, r in self._live.items() if name in self._waiting]
        assert self._num_waiting_tokens == sum(len(r.request.prompt_token_ids) for r in waiting)
        assert all(self._live.get(r.request_id) is r for r in self._suspects), "a suspect has ended"
