"""Plans made by hand: so many rows in the middle of their answers, or a chunk of a prompt, each over its own pages."""

from __future__ import annotations

from collections.abc import Iterable

from jcb.config import Limits, ServeConfig, replace
from jcb.config_file import override, parse_settings
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan

PAGE_SIZE = 16


def narrow_config(
    *, rows: tuple[int, ...], tokens: int, longest: int, slots: int = 0, pages: int = 0, settings: Iterable[str] = ()
) -> ServeConfig:
    """The default model's configuration with the few programs that a measurement needs: decode steps of `rows` rows,
    one prefill program of `tokens` tokens, and pages for as many sequences of `longest` tokens as the most rows unless
    `pages` says how many. slots: more of them than rows. settings: "key=value" texts, of anything else; ValueError for
    one that is decided here.
    """
    most = slots or max(*rows, 2)
    sizes = {
        "max_num_seqs": most,
        "max_num_batched_tokens": max(tokens, most),
        "max_model_len": longest,
        "decode_row_buckets": tuple(sorted({*(max(count, 2) for count in rows), most})),
        "prefill_row_buckets": (most,),
        "token_buckets": (max(tokens, most),),
    }
    pages = pages or max(rows) * -(-longest // PAGE_SIZE) + 2
    cache = {"num_pages": pages, "page_size": PAGE_SIZE, "enable_prefix_caching": False}
    given = parse_settings(settings)
    decided = {f"scheduler.{name}" for name in sizes} | {f"cache.{name}" for name in cache}
    if taken := sorted(decided.intersection(given)):
        raise ValueError(f"{', '.join(taken)} cannot be set here: the measurement decides it")
    return replace(replace(override(ServeConfig(), given), "scheduler", **sizes), "cache", **cache)


class Crowd:
    """Sequences in slots 0, 1, 2 … of one engine, whose plans need no scheduler. What the cache holds is no matter."""

    def __init__(self, limits: Limits, rows: int, longest: int) -> None:
        width = limits.pages_for(longest)
        if rows * width > limits.usable_pages:
            raise ValueError(
                f"{rows} rows of {longest} tokens need {rows * width:,} pages, not {limits.usable_pages:,}"
            )
        self._limits = limits
        self._sequences = [
            Sequence(
                Request(
                    request_id=f"{slot}", prompt_token_ids=(1,) * longest, max_tokens=1,
                    params=SamplingParams(temperature=0.0),
                )
            )
            for slot in range(rows)
        ]  # fmt: skip
        self._pages = [tuple(range(1 + slot * width, 1 + (slot + 1) * width)) for slot in range(rows)]

    def decode(self, context: int) -> StepPlan:
        """One token for each, at a length of `context` tokens."""
        return StepPlan(0, tuple(self._row(slot, context - 1, 1, samples=True) for slot in range(len(self._pages))))

    def chunk(self, tokens: int, start: int = 0) -> StepPlan:
        """`tokens` tokens of one prompt from position `start` on."""
        return StepPlan(0, (self._row(0, start, tokens, samples=False),))

    def _row(self, slot: int, start: int, q_len: int, *, samples: bool) -> ScheduledRow:
        pages = self._pages[slot][: self._limits.pages_for(start + q_len)]
        ids = tuple(1 + (start + i) * 7919 % 1000 for i in range(q_len))
        return ScheduledRow(
            self._sequences[slot], slot, start, q_len, RowKind.CONTINUED, samples, ids, pages, 0, -1 if samples else 1
        )
