"""The mask program: which ids the rows with a grammar may sample in the step that follows.

It runs before a step for the rows of that step that have a grammar, some at a time, and never for others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jcb.steps.state import DeviceState, mask_words
from jcb.types import StepPlan

MASK_ROWS = 8
"""Slots that one run of the program can set."""


def packed_size(vocab_size: int) -> int:
    """Length of the packed array: MASK_ROWS slots, then their masks."""
    return MASK_ROWS * (1 + mask_words(vocab_size))


def pack(plan: StepPlan, vocab_size: int, num_slots: int) -> Iterator[np.ndarray]:
    """The masks of `plan`, as one i32[packed_size] for each run that they need; fresh arrays."""
    rows = [(row.slot, row.mask) for row in plan.rows if row.mask is not None]
    for first in range(0, len(rows), MASK_ROWS):
        packed = np.zeros((MASK_ROWS, 1 + mask_words(vocab_size)), np.int32)
        packed[:, 0] = num_slots
        for line, (slot, row_mask) in zip(packed, rows[first : first + MASK_ROWS], strict=False):
            line[0], line[1:] = slot, row_mask
        yield packed.reshape(-1)


def load_masks(state: DeviceState, packed: jax.Array) -> DeviceState:
    """`state` with the masks of some slots replaced; slots out of range are none."""
    lines = packed.reshape(MASK_ROWS, -1)
    return dataclasses.replace(state, mask=state.mask.at[lines[:, 0]].set(lines[:, 1:], mode="drop"))


def allowed(masks: jax.Array, vocab_size: int) -> jax.Array:
    """bool[R, V] from i32[R, W] masks: bit i of word w stands for id 32 w + i."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(masks.shape[0], -1)[:, :vocab_size] != 0
