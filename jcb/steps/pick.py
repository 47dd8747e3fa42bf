"""The pick program: the tokens of steps in which the likeliest is not all that is wanted.

A step takes the likeliest token of every row itself. Where some row draws, changes its logits or wants alternatives,
this program follows on the logits of the step and chooses for all its rows; its outputs replace those of the step.
"""

from __future__ import annotations

import jax
import numpy as np

from jcb.steps import outputs, sampling
from jcb.steps.inputs import ROW_FIELDS, SAMPLES, read_rows, views
from jcb.steps.shapes import StepShape
from jcb.steps.state import DeviceState

_FLAGS, _TEMPERATURE, _LOGPROBS = (ROW_FIELDS.index(name) for name in ("flags", "temperature", "num_logprobs"))


def packed_size(num_rows: int) -> int:
    """Length of the packed array of a step of `num_rows` rows."""
    return num_rows * len(ROW_FIELDS)


def split(packed: np.ndarray, shape: StepShape) -> np.ndarray | None:
    """The row records of a packed step that needs this program, as a fresh i32[packed_size]; None for other steps.

    `packed` is then changed so that the step leaves what slots remember to this program.
    """
    records = views(packed, shape)[0]
    flags = records[:, _FLAGS]
    samples = (flags & SAMPLES) != 0
    wants = (flags > SAMPLES) | (records[:, _TEMPERATURE] != 0) | (records[:, _LOGPROBS] > 0)
    if not (samples & wants).any():
        return None
    taken = records.reshape(-1).copy()
    flags &= ~SAMPLES
    return taken


def pick_step(logits: jax.Array, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, jax.Array]:
    """One token for every row of f32[R, V] logits, each by its own rule. packed: see `split`.

    Returns the state and the outputs i32[R, outputs.WIDTH].
    """
    rows = read_rows(packed.reshape(-1, len(ROW_FIELDS)))
    sampled = sampling.sample(logits, rows, rows.kv_len, state)
    return sampling.remember(state, rows, sampled), outputs.pack(sampled)
