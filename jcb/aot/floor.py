"""The least that a step must do, from its shape alone: every weight and every live key and value once.

Host half: nothing here is measured or compiled. Bytes and operations are of one device; "live" means that every row of
the batch is as long as its page table and the pages in the cache allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcb.chips import Chip
from jcb.config import Limits, ModelConfig
from jcb.models.specs import nbytes, param_specs
from jcb.steps.shapes import StepShape
from pallas_kernels.page import ITEM_BYTES, PageShape


@dataclass(frozen=True)
class Floor:
    """Bytes to move and operations to do."""

    nbytes: int
    flops: float

    def seconds(self, chip: Chip) -> float:
        """The shortest time on `chip`: its memory or its arithmetic, whichever takes longer."""
        return max(self.nbytes / chip.bandwidth, self.flops / chip.flops)


def live_share(shape: StepShape, limits: Limits) -> float:
    """How full the page tables of a step can be: 1, or less where there are not so many pages."""
    return min(1.0, limits.usable_pages / (shape.num_rows * shape.pages_per_seq))


def step_floor(
    model: ModelConfig, layout: PageShape, dtype: str, shape: StepShape, limits: Limits, devices: int
) -> Floor:
    """What one step of `shape` cannot do without. layout, model: of the whole model, which
    `devices` share.
    """
    share, specs, item = live_share(shape, limits), param_specs(model), ITEM_BYTES[dtype]
    weights = nbytes(specs, dtype, devices)
    embedding = nbytes({"embedding": specs["embedding"]}, dtype, devices)
    if not model.tie_word_embeddings:  # the table is only looked up in; the head is read whole
        weights -= embedding
        weights += shape.num_tokens * model.hidden_size * item
    pages = int(share * shape.num_rows * shape.pages_per_seq)
    cache = model.num_layers * pages * layout.page_bytes // devices
    matrices = nbytes({k: v for k, v in specs["layers"].items() if k.startswith("w_")}, dtype, devices) / item
    head = embedding / item
    context = share * shape.pages_per_seq * layout.page_size
    attention = 4.0 * model.num_heads * model.head_dim * model.num_layers * shape.num_tokens * context / devices
    if not shape.decode:  # at least the tokens themselves, each seeing half of them
        attention *= min(shape.num_tokens / 2 / context, 1.0)
    return Floor(weights + cache, 2.0 * matrices * shape.num_tokens + 2.0 * head * shape.num_rows + attention)
