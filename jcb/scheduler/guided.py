"""Sequences that follow a grammar: when they may run, and when they end.

Which token may come next depends on the one before, so such a sequence has a row only when nothing of it is pending:
in every second step under overlap. Its matcher follows `output_token_ids` and nothing else, so neither a preemption nor
a failed step concerns it.
"""

from __future__ import annotations

import numpy as np

from jcb.scheduler.record import Record
from jcb.types import FinishReason


def begin(record: Record) -> None:
    """Give the record a matcher if its request has a grammar."""
    if record.request.grammar is not None:
        record.matcher = record.request.grammar.start(held_back(record))


def must_wait(record: Record) -> bool:
    """True while the mask of the record's next token is not known."""
    return record.matcher is not None and record.num_pending > 0


def mask_of(record: Record) -> np.ndarray | None:
    """The ids that the record's next token may be, None for any."""
    return None if record.matcher is None else record.matcher.mask


def may_stop(record: Record) -> bool:
    """Whether a stop string may end the answer here: never short of what its grammar asks for, nor at its end."""
    return record.matcher is None or (record.matcher.accepts and not record.matcher.is_complete)


def held_back(record: Record) -> frozenset[int]:
    """Ids that the next token should not be although the grammar allows them."""
    request = record.request
    held: frozenset[int] = frozenset()
    if request.grammar is not None and request.params.ignore_eos:
        held |= request.grammar.end_ids
    if len(record.output_token_ids) < request.params.min_tokens:
        held |= record.stop_ids
    return held


def end_after(record: Record, token_id: int) -> FinishReason | None:
    """Why the sequence ends with the token it just got, or None. A stop id ends it only where the grammar accepts:
    before that token if it is left out of the answer, else behind it.
    """
    matcher, request = record.matcher, record.request
    assert matcher is not None
    generated = len(record.output_token_ids)
    stops = token_id in record.stop_ids and generated > request.params.min_tokens
    is_hidden = token_id in request.eos_token_ids or not request.params.include_stop_str_in_output
    if stops and is_hidden and matcher.accepts:
        return FinishReason.STOP
    matcher.advance(token_id, held_back(record))
    if matcher.is_complete or (stops and not is_hidden and matcher.accepts):
        return FinishReason.STOP
    return FinishReason.LENGTH if generated >= record.limit else None
