"""What a step costs, from its shape: the work of a plan, a roofline for any chip, and the host around it.

The device reads the weights once a step, however many tokens share it, reads K and V of every live token, and computes
what the bucket holds, padding included. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jcb.chips import Chip
from jcb.config import ModelConfig
from jcb.recording.events import Step
from jcb.simulate.links import Link
from jcb.simulate.shape import ModelShape
from jcb.steps.shapes import Shapes
from jcb.types import RowKind, ScheduledRow, StepPlan
from pallas_kernels.page import ITEM_BYTES

StepCost = Callable[[StepPlan], float]
"""Seconds that a plan takes on the device."""


class StepWork(NamedTuple):
    """A step as its cost sees it.

    tokens and rows were asked for, padded_ ones are computed. Cache tokens read: decode_kv by rows of one token,
    chunk_kv by longer ones; chunk_pairs: pairs of a query token and one it attends to, in those. is_decode: the
    program computes one token a row.
    """

    tokens: int
    rows: int
    padded_tokens: int
    padded_rows: int
    decode_kv: int
    chunk_kv: int
    chunk_pairs: float
    is_decode: bool


class CostModel(Protocol):
    """Device seconds of a step."""

    def seconds(self, work: StepWork) -> float: ...


def work_of(plan: StepPlan, shapes: Shapes) -> StepWork:
    """The work of a plan in the bucket that holds it."""
    rows = plan.rows
    count, tokens = len(rows), plan.num_tokens
    if tokens == count and not any(row.wants_prompt_logprobs for row in rows):
        shape = shapes.fit(tokens, count, only_decodes=True)
        kv = sum([row.start for row in rows]) + count
        return StepWork(tokens, count, shape.num_tokens, shape.num_rows, kv, 0, 0.0, shape.decode)
    shape = shapes.fit(tokens, count, only_decodes=False)
    return _mixed(((row.start, row.q_len) for row in rows), count, shape.num_tokens, shape.num_rows, shape.decode)


def work_without_transferred(plan: StepPlan, shapes: Shapes) -> StepWork:
    """As `work_of` where the prompts of new sequences come from elsewhere: only their last token is computed."""
    spans = [(row.start, row.q_len) if row.kind is not RowKind.NEW else _last(row) for row in plan.rows]
    tokens, count = sum(q_len for _, q_len in spans), len(spans)
    top = shapes.prefill[-1]
    if tokens <= top.num_tokens:
        shape = shapes.fit(tokens, count, only_decodes=tokens == count)
        return _mixed(spans, count, shape.num_tokens, shape.num_rows, shape.decode)
    return _mixed(spans, count, tokens, top.num_rows, is_decode=False)


def work_of_step(step: Step) -> StepWork:
    """The work of a recorded step."""
    tokens, rows, _ = step.bucket
    is_decode = tokens == rows and step.is_decode
    return _mixed(((row.start, row.q_len) for row in step.rows), len(step.rows), tokens, rows, is_decode)


def _last(row: ScheduledRow) -> tuple[int, int]:
    return row.start + row.q_len - 1, 1


def _mixed(spans: Iterable[tuple[int, int]], rows: int, tokens: int, padded_rows: int, is_decode: bool) -> StepWork:
    total, decode_kv, chunk_kv, pairs = 0, 0, 0, 0.0
    for start, q_len in spans:
        total += q_len
        if q_len == 1:
            decode_kv += start + 1
        else:
            chunk_kv += start + q_len
            pairs += q_len * (start + (q_len + 1) / 2)
    return StepWork(total, rows, tokens, padded_rows, decode_kv, chunk_kv, pairs, is_decode)


@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """A model on a chip, each phase at a share of what the chip could.

    bandwidth_share, flops_share: 0.85 and 0.60 by default; an attention kernel for TPUs was published at 86 % of
    bandwidth in decoding and 73 % of peak in prefilling (arXiv 2604.15464). launch: seconds a step beside the work.
    link: between the `tensor_parallel` devices, which then share weights, heads and cache.
    """

    shape: ModelShape
    chip: Chip
    dtype: str
    kv_dtype: str
    tensor_parallel: int = 1
    link: Link | None = None
    bandwidth_share: float = 0.85
    flops_share: float = 0.60
    launch: float = 20e-6

    @staticmethod
    def of(model: ModelConfig, chip: Chip, **options: object) -> RooflineCost:
        """For `model` in the data type that the chip prefers; `options` are the other fields."""
        values: dict = {"dtype": chip.dtype} | options
        values.setdefault("kv_dtype", values["dtype"])
        return RooflineCost(shape=ModelShape.of(model), chip=chip, **values)

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "flops_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        if self.tensor_parallel > 1 and self.link is None:
            raise ValueError(f"{self.tensor_parallel=} needs a link between the devices")

    def seconds(self, work: StepWork) -> float:
        """Of one step on the device."""
        bandwidth = self.chip.bandwidth * self.bandwidth_share * self.tensor_parallel
        flops = self.chip.flops * self.flops_share * self.tensor_parallel
        shape, kv = self.shape, self.shape.kv_bytes(self.kv_dtype)
        weights = shape.step_bytes(self.dtype) / bandwidth
        linear = 2 * (work.padded_tokens * shape.layer_parameters + work.padded_rows * shape.head_parameters) / flops
        seconds = self.launch + max(weights, linear) + work.decode_kv * kv / bandwidth
        if work.chunk_kv:
            seconds += max(work.chunk_kv * kv / bandwidth, work.chunk_pairs * shape.attention_flops / flops)
        if self.link is not None:
            message = work.padded_tokens * shape.hidden_size * ITEM_BYTES[self.dtype]
            seconds += 2 * shape.num_layers * self.link.all_reduce_seconds(message, self.tensor_parallel)
        return seconds


@dataclass(frozen=True)
class Affine:
    """Seconds that grow with the rows of a step."""

    fixed: float = 0.0
    row: float = 0.0

    def __call__(self, rows: int) -> float:
        return self.fixed + self.row * rows


@dataclass(frozen=True)
class HostCost:
    """What the engine's thread does in a turn: before the dispatch, in it, and after results are there.

    Under overlap all but a step's first dispatch hides behind the device, as long as it is shorter. The defaults are
    about half of what two busy cores of an AMD EPYC took (0.1 ms + 7 µs a row, 0.8 ms, 0.3 ms + 5 µs a row); a
    calibration has those of its machine.
    """

    before: Affine = field(default_factory=lambda: Affine(60e-6, 4e-6))
    dispatch: Affine = field(default_factory=lambda: Affine(400e-6, 6e-6))
    after: Affine = field(default_factory=lambda: Affine(80e-6, 12e-6))


NO_HOST = HostCost(Affine(), Affine(), Affine())
"""A host that takes no time."""


def step_cost(model: CostModel, shapes: Shapes, *, transferred: bool = False) -> StepCost:
    """`model` as a function of plans. transferred: prompts of new sequences come from another pool."""
    work = work_without_transferred if transferred else work_of
    return lambda plan: model.seconds(work(plan, shapes))
