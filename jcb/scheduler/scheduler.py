"""The scheduler: requests in, one `StepPlan` a step out, `StepResult`s back in.

Each step is decided anew, token by token and not request by request: first one token for every sequence that is
generating, then chunks of prompts, then new arrivals while budget, slots and pages last. Sequences run in order of
precedence (oldest first); when pages run short the youngest gives up its own and is computed again later.
The oldest running sequence therefore always advances, and every admitted request ends.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from jcb.config import Limits, SchedulerConfig
from jcb.scheduler import chunk, guided, knobs, policy, results
from jcb.scheduler.draft import Draft
from jcb.scheduler.pages import PageLedger
from jcb.scheduler.queue import Queue
from jcb.scheduler.record import Record
from jcb.scheduler.roster import Roster
from jcb.types import FinishReason, Request, RequestError, ScheduledRow, SequenceOutput, StepPlan, StepResult


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
        self.config = self.ceiling = config
        self._limits = limits
        self._reserves = config.admission != "paged"  # pages for the longest possible answer, at admission
        self._spare_pages = limits.usable_pages // 100  # left free by admissions while others run, against thrashing
        self._pages = PageLedger(limits, enable_prefix_caching=enable_prefix_caching, root=root)
        self._roster = Roster(config.max_num_seqs)
        self._queue = Queue(config.policy)
        self._suspects: list[Record] = []  # by order; they were in a failed step and must pass one alone
        self._in_flight: dict[int, StepPlan] = {}
        self._chunk_half = policy.chunk_half(config)
        self._num_steps = 0
        self._num_added = 0
        self._num_preemptions = 0

    def turn(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """Change knobs between two steps, all or none; RequestError 400 for a value outside its bounds.

        With fewer sequences allowed the youngest give up their slots in the next step and go on later.
        """
        before, self.config = self.config, knobs.turn(self.config, self.ceiling, changes)
        if self.config.policy != before.policy:
            self._queue = Queue(self.config.policy)
            self._roster.reorder(self._queue.order, self._queue.place)
            self._suspects.sort(key=attrgetter("order"))
        return self.config

    def knobs(self) -> dict[str, dict[str, Any]]:
        """Each knob's value and what it may be; any thread may ask."""
        return knobs.describe(self.config, self.ceiling)

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        return len(self._roster) > 0

    @property
    def num_running(self) -> int:
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._roster.num_waiting_tokens

    def add(self, request: Request, now: float) -> None:
        """Queue a request. RequestError 400 when it can never be served, 429 when the queue is full."""
        if self._roster.get(request.request_id) is not None:
            raise RequestError("a request with this id is being served", param="request_id", code="duplicate_request")
        policy.check_can_ever_fit(request, self._limits)
        size = len(request.prompt_token_ids)
        policy.check_queue(self.config, self._limits, self.num_waiting, self.num_waiting_tokens, prompt_tokens=size)
        self._num_added += 1
        record = Record(
            request,
            order=self._queue.order(request, self._num_added),
            place=self._queue.place(request, self._num_added),
            limit=policy.generation_limit(request, self._limits),
            stop_ids=policy.stop_ids(request),
        )
        guided.begin(record)
        self._roster.enter(record, now + self.config.queue_timeout)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> SequenceOutput | None:
        """End a request now, whatever its state; None when it is unknown or has ended."""
        record = self._roster.get(request_id)
        return None if record is None else self._finish(record, reason)

    def expire(self, now: float) -> list[SequenceOutput]:
        """End the requests that waited or ran too long."""
        outputs = []
        while (record := self._roster.first_due(now)) is not None:
            error = results.timed_out(self.config, started=record.was_scheduled)
            outputs.append(self._finish(record, FinishReason.ERROR, error))
        return outputs

    # ---- one step

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Without rows there is nothing to run until a result comes in or a request does."""
        draft = Draft(self.config.max_num_batched_tokens)
        if self._suspects:
            self._plan_suspect(draft)
        else:
            self._keep_to_slots(draft)
            self._force_preemption(draft)
            self._plan_running(draft)
            if not draft.preempted:
                self._admit(draft)
        return self._commit(draft, now)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in what a step produced. A plan that is not in flight (seen before, or discarded) yields nothing."""
        if self._in_flight.pop(plan.step_id, None) is None:
            return []
        view = results.ResultView(result)
        outputs = []
        for index, row in enumerate(plan.rows):
            record = self._roster.get(row.sequence.request.request_id)
            if record is None or record is not row.sequence:
                continue  # ended meanwhile
            output = self._take(record, row, index, view, now)
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
        for row in (row for lost in self._in_flight.values() for row in lost.rows):
            row.sequence.num_pending = 0
        self._in_flight.clear()
        for record in self._roster.running():
            self._evacuate(record)
        self._pages.clear()
        for row in plan.rows:
            record = self._roster.get(row.sequence.request_id)
            if record is None or record is not row.sequence:
                continue
            if record in self._suspects:  # so it ran alone
                return [self._finish(record, FinishReason.ERROR, results.step_failed(error))]
            self._suspect(record, row.kv_len)
        return []

    # ---- deciding a step

    def _plan_running(self, draft: Draft) -> None:
        """Rows for sequences that hold slots: one token each for those that generate, then chunks."""
        unfinished = []
        for record in self._roster.running():
            if record.slot < 0:
                continue  # preempted a moment ago for an older one
            if record.num_tokens - record.num_computed > 1:
                unfinished.append(record)
            elif record.num_generated < record.limit and (record.matcher is None or not guided.must_wait(record)):
                self._plan_row(draft, record, 1)
        for record in unfinished:
            if record.slot >= 0:
                self._plan_chunk(draft, record)

    def _plan_chunk(self, draft: Draft, record: Record) -> None:
        most = min(self.config.max_prefill_chunk or draft.budget, draft.budget)
        if most > 0:
            q_len, charge = chunk.cut(record.num_computed, record.num_tokens, most, self._chunk_half)
            draft.keys.update(self._pages.keys_in_progress(record, q_len))
            self._plan_row(draft, record, q_len, charge)
        draft.promised += max(self._limits.pages_for(record.num_tokens) - len(record.pages), 0)

    def _plan_row(self, draft: Draft, record: Record, q_len: int, charge: int = 0) -> None:
        """Give the record a row if its pages can be had, preempting younger ones for them (charge: `Draft.add`)."""
        missing = self._limits.pages_for(record.num_computed + q_len) - len(record.pages)
        if missing > 0:
            while self._pages.num_available < missing:
                victim = self._victim(record)
                if victim is None:
                    return  # it keeps what it has and waits; an older one can take that
                self._preempt(draft, victim)
            self._pages.grow(record, missing)
        draft.add(record, q_len, charge)

    def _victim(self, record: Record) -> Record | None:
        """Who gives up pages for `record`: the youngest, if it is younger. A suspect may ask anybody."""
        for other in self._roster.youngest():
            if other is not record:
                return other
            if not self._suspects:
                break
        return None

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, in their order, while slots, budget and pages last."""
        static = self.config.admission == "static"
        if static and self._roster.num_running:
            return
        while self._roster.num_running < self.config.max_num_seqs and (draft.budget > 0 or static):
            record = self._queue.next(self._roster, self._pages)
            if record is None or record.num_pending or not self._start(record, draft):
                return
            self._plan_chunk(draft, record)

    def _start(self, record: Record, draft: Draft) -> bool:
        """Give a waiting record a slot and its cached pages; False when what it needs is not available."""
        tokens = len(record.request.prompt_token_ids) + record.limit if self._reserves else record.num_tokens
        wanted = self._limits.pages_for(tokens)
        keys = self._pages.keys(record)
        hits = self._pages.match(keys)
        if len(hits) < len(keys) and self._yields(record, keys[len(hits)], draft):
            return False
        spare = self._spare_pages + draft.promised if self._roster.num_running else 0
        if self._pages.price(hits, wanted) + spare > self._pages.num_available:
            return False
        self._pages.adopt(record, hits)
        if self._reserves:
            self._pages.grow(record, wanted - len(hits))
        if not record.was_scheduled:
            record.num_cached = record.num_computed
        self._queue.admit(record, self._roster)
        self._roster.seat(record)
        return True

    def _yields(self, record: Record, key: bytes, draft: Draft) -> bool:
        """Whether it waits, one step at most, because the next page of its prefix is being filled by another."""
        if record.has_yielded or key not in draft.keys or self.config.admission == "static":
            return False
        record.has_yielded = True
        return True

    def _plan_suspect(self, draft: Draft) -> None:
        """The first suspect alone, once nothing is in flight."""
        if self._in_flight:
            return
        record = self._suspects[0]
        while record.slot < 0 and not self._start(record, draft):
            self._preempt(draft, next(self._roster.youngest()))
        self._plan_chunk(draft, record)

    def _keep_to_slots(self, draft: Draft) -> None:
        """The youngest leave when fewer may run than do."""
        while self._roster.num_running > self.config.max_num_seqs:
            self._preempt(draft, next(self._roster.youngest()))

    def _force_preemption(self, draft: Draft) -> None:
        """`preempt_every`: the youngest that gained a token since it was admitted, so that all still end."""
        every = self.config.preempt_every
        if every and self._num_steps % every == every - 1:
            for record in self._roster.youngest():
                if record.num_generated > record.num_generated_before:
                    self._preempt(draft, record)
                    return

    def _commit(self, draft: Draft, now: float) -> StepPlan:
        """Turn the decision into a plan and advance the records by it."""
        rows = draft.rows
        order = [record for record, q_len in rows.items() if q_len == 1]
        order += [record for record, q_len in rows.items() if q_len > 1]
        self._num_steps += 1
        plan = StepPlan(
            self._num_steps,
            tuple([self._advance(record, rows[record], now) for record in order]),
            tuple(draft.preempted),
        )
        if order:
            self._in_flight[plan.step_id] = plan
        return plan

    def _advance(self, record: Record, q_len: int, now: float) -> ScheduledRow:
        """The record's row; from here on the record counts it as computed."""
        start = record.num_computed
        end = start + q_len
        num_output = len(record.output_token_ids) + record.num_pending
        samples = end == len(record.request.prompt_token_ids) + num_output
        num_pages = self._limits.pages_for(end)
        if len(record.page_table) != num_pages:
            record.page_table = tuple(record.pages[:num_pages])
        row = ScheduledRow(
            record,
            record.slot,
            start,
            q_len,
            record.kind,
            samples,
            (record.token(start),) if q_len == 1 else tuple(record.tokens(start, end)),
            record.page_table,
            num_output,
            -1 if samples else record.token(end),
            guided.mask_of(record) if samples and record.matcher is not None else None,
        )
        record.num_computed = end
        if samples:
            record.num_pending += 1
        if record.is_fresh:
            self._note_first_row(record, now)
        if q_len > 1 or not samples:
            self._pages.publish(record)
        return row

    def _note_first_row(self, record: Record, now: float) -> None:
        record.is_fresh = False
        if not record.was_scheduled:
            record.was_scheduled = True
            record.first_scheduled_time = now
            self._roster.set_deadline(record, now + self.config.run_timeout)

    # ---- taking in results

    def _take(
        self, record: Record, row: ScheduledRow, index: int, view: results.ResultView, now: float
    ) -> SequenceOutput | None:
        """One row's part of a result; None when the sequence gained nothing to tell."""
        token_id = view.token_ids[index]
        if row.samples:
            record.num_pending -= 1
        error = view.row_error(index, row, self._limits.vocab_size)
        if error is not None:
            self._pages.condemn(record)
            return self._finish(record, FinishReason.ERROR, error)
        if self._suspects and row.kv_len >= record.must_prove:
            self._acquit(record)
        prompt_logprobs = view.prompt_logprobs(index, row, record) if view.has_prompt_logprobs else ()
        if not row.samples:
            return results.prompt_output(record, prompt_logprobs) if prompt_logprobs else None
        record.output_token_ids.append(token_id)
        if record.first_token_time is None:
            record.first_token_time = now
        self._pages.publish(record)
        reason = (policy if record.matcher is None else guided).end_after(record, token_id)
        if reason is not None:
            self._end(record, reason)
        elif record.matcher is not None and record.matcher.error is not None:
            return self._finish(record, FinishReason.ERROR, record.matcher.error)
        return results.token_output(record, token_id, view.logprobs(index, record), prompt_logprobs)

    def _finish(self, record: Record, reason: FinishReason, error: RequestError | None = None) -> SequenceOutput:
        """End a sequence for a reason other than its tokens."""
        self._end(record, reason)
        return SequenceOutput(record.request_id, finish_reason=reason, error=error, num_cached_tokens=record.num_cached)

    # ---- changes of state

    def _preempt(self, draft: Draft, record: Record) -> None:
        """Take the record's pages and slot for others; it is computed again later, its outputs stay."""
        draft.withdraw(record)
        draft.preempted.append(record.request_id)
        record.num_preemptions += 1
        self._num_preemptions += 1
        self._evacuate(record)

    def _evacuate(self, record: Record) -> None:
        self._pages.drop(record)
        self._roster.unseat(record)

    def _end(self, record: Record, reason: FinishReason) -> None:
        """Free all that the record holds and forget it."""
        self._pages.drop(record)
        self._roster.leave(record)
        self._acquit(record)
        record.finish_reason = reason
        self._queue.end(record)

    def _suspect(self, record: Record, length: int) -> None:
        """The record was in a failed step that brought it to `length`."""
        record.must_prove = max(record.must_prove + 1, length)
        if record not in self._suspects:
            bisect.insort(self._suspects, record, key=attrgetter("order"))

    def _acquit(self, record: Record) -> None:
        """No longer a suspect, if it was one."""
        if record in self._suspects:
            self._suspects.remove(record)

    # ---- looking in

    def stats(self) -> dict[str, int]:
        """Numbers for metrics: sequences, pages, prefix-cache tokens, preemptions so far."""
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "preemptions": self._num_preemptions,
            **self._pages.stats(),
        }

    def cached_pages(self) -> list[int]:
        """Pages that only the prefix cache holds, the next to be evicted first."""
        return self._pages.cached()

    def check_integrity(self) -> None:
        """Assert that slots, pages and queues agree with the records."""
        self._roster.check_integrity()
        self._pages.check_integrity(self._roster.running())
        assert all(self._roster.get(record.request_id) is record for record in self._suspects), "a suspect has ended"
