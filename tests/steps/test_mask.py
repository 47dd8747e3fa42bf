"""A row with a grammar gets an allowed id, and its mates get the bits that they would get without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcb.steps import inputs, mask
from jcb.steps.inputs import SAMPLES, SUPPRESSES_STOP, USES_BIAS, USES_MASK
from jcb.steps.state import mask_words
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from tests.steps.test_sampling import LOGITS, V, draw, state

ALLOWED = {0: (7, 299), 2: (31, 32, 64), 3: (128,)}  # by slot


def words(ids) -> np.ndarray:
    bits = np.zeros(32 * mask_words(V), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def plan(masks: dict[int, np.ndarray | None], **params) -> StepPlan:
    rows = []
    for index, (slot, ids) in enumerate(masks.items()):
        request = Request(request_id=f"r{index}", prompt_token_ids=(5,), params=SamplingParams(**params))
        rows.append(ScheduledRow(Sequence(request, slot=slot), slot, 0, 1, RowKind.NEW, True, (5,), (1,), 0, -1, ids))
    return StepPlan(1, tuple(rows))


def loaded(masks, device=None, slots=6):
    device = device or state(slots)
    for packed in mask.pack(plan(masks), V, slots):
        device = jax.jit(mask.load_masks)(device, packed)
    return device


def test_masks_reach_their_slots_and_no_others():
    masks = {slot: words(ids) for slot, ids in ALLOWED.items()}
    device = loaded(masks | {1: None})
    for slot in range(6):
        expected = masks.get(slot, np.full(mask_words(V), -1, np.int32))
        np.testing.assert_array_equal(device.mask[slot], expected)


def test_more_rows_than_one_run_holds():
    masks = {slot: words({slot}) for slot in range(19)}
    device = loaded(masks, slots=20)
    assert len(list(mask.pack(plan(masks), V, 20))) == 3
    np.testing.assert_array_equal(device.mask[:19], np.stack(list(masks.values())))
    assert np.all(np.asarray(device.mask[19]) == -1)


def test_a_plan_without_grammars_runs_no_mask_program():
    assert list(mask.pack(plan({0: None, 1: None}), V, 6)) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 9.0])
def test_only_allowed_ids_are_sampled(temperature):
    device = loaded({slot: words(ids) for slot, ids in ALLOWED.items()})
    specs = [
        {"flags": SAMPLES | (USES_MASK if slot in ALLOWED else 0), "temperature": temperature} for slot in range(6)
    ]
    free = draw(LOGITS, *[{"temperature": temperature}] * 6)
    seen = {slot: set() for slot in ALLOWED}
    for position in range(40):
        out = draw(LOGITS, *specs, device=device, positions=[position] * 6)
        for slot in ALLOWED:
            seen[slot].add(int(out.token_ids[slot]))
        assert np.all(out.finite)
    for slot, ids in ALLOWED.items():
        assert seen[slot] <= set(ids)
        if temperature == 9.0:
            assert seen[slot] == set(ids)
    out = draw(LOGITS, *specs, device=device)
    for slot in {0, 1, 2, 3, 4, 5} - ALLOWED.keys():
        assert out.token_ids[slot] == free.token_ids[slot]
        assert out.logprobs[slot] == free.logprobs[slot]


def test_logprobs_are_of_the_unmodified_logits():
    device = loaded({0: words({17})})
    out = draw(LOGITS[:1], {"flags": SAMPLES | USES_MASK, "num_logprobs": 5}, device=device)
    free = draw(LOGITS[:1], {"num_logprobs": 5})
    want = LOGITS[0, 17] - np.log(np.exp(LOGITS[0].astype(np.float64)).sum())
    np.testing.assert_allclose(out.logprobs[0], want, atol=1e-5)
    np.testing.assert_array_equal(out.top_ids, free.top_ids)


def test_a_bias_ranks_what_is_allowed_and_allows_nothing_more():
    bias = jnp.zeros((6, V)).at[0, 64].set(50.0).at[0, 7].set(-100.0).at[0, 299].set(-100.0)
    device = loaded({0: words({7, 299})}).replace(bias=bias)
    out = draw(LOGITS[:1], {"flags": SAMPLES | USES_MASK | USES_BIAS}, device=device)
    assert int(out.token_ids[0]) == (7 if LOGITS[0, 7] > LOGITS[0, 299] else 299)


def test_a_mask_left_by_another_sequence_is_not_read():
    device = loaded({0: words({17})})
    assert int(draw(LOGITS[:1], {}, device=device).token_ids[0]) == LOGITS[0].argmax()


def test_the_flags_of_a_row_with_a_mask():
    flags = inputs.row_flags(plan({0: words({1})}, min_tokens=3).rows[0])
    assert flags == SAMPLES | USES_MASK
    flags = inputs.row_flags(plan({0: None}, min_tokens=3).rows[0])
    assert flags == SAMPLES | SUPPRESSES_STOP
