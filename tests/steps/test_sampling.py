"""Sampling against numpy, and the promise that a row's token depends on its own rule alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcb.config import Limits
from jcb.steps import inputs, slot
from jcb.steps.inputs import ROW_FIELDS, SAMPLES, SUPPRESSES_STOP, USES_BIAS, USES_PENALTIES, Rows
from jcb.steps.packer import Packer
from jcb.steps.sampling import likeliest, sample
from jcb.steps.shapes import StepShape
from jcb.steps.state import init_state
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from pallas_kernels.layout import KVLayout

V = 300
NEUTRAL = {
    "slot": 0, "q_len": 1, "kv_len": 4, "flags": SAMPLES, "num_logprobs": -1, "seed_low": 0, "seed_high": 0,
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0,
    "repetition": 1.0,
}  # fmt: skip
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (6, V)).astype(np.float32)
run = jax.jit(sample)


def rows(*specs: dict) -> Rows:
    assert set(NEUTRAL) == set(ROW_FIELDS)
    merged = [{**NEUTRAL, "slot": i, **spec} for i, spec in enumerate(specs)]
    return Rows(**{name: jnp.asarray([row[name] for row in merged]) for name in ROW_FIELDS})


def state(slots: int = 6, vocab: int = V):
    hidden = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    return init_state(KVLayout("cpu", "float32", 1, 8, 4), 1, 2, slots, vocab, hidden)


def draw(logits, *specs, device=None, positions=None):
    positions = jnp.full(len(specs), 7) if positions is None else jnp.asarray(positions)
    return run(jnp.asarray(logits), rows(*specs), positions, device or state())


def draw_many(logits, spec, count=512):
    """`count` draws of one row, at positions 0 … count - 1."""
    specs = [{**spec, "slot": 0}] * count
    return np.asarray(draw(np.repeat(np.asarray(logits)[None], count, 0), *specs, positions=np.arange(count)).token_ids)


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x))
    return x / x.sum()


def kept(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the filters, by sorting: the oracle."""
    p = softmax(np.asarray(logits, np.float64) / temperature)
    p = np.where(p >= min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        mass = np.cumsum(p[order]) / p.sum()
        p[order[np.searchsorted(mass, top_p) + 1 :]] = 0
    return p / p.sum()


def test_greedy_takes_the_best_and_reports_raw_logprobs():
    out = draw(LOGITS, *[{"num_logprobs": 5}] * 6)
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_array_equal(out.token_ids, LOGITS.argmax(-1))
    np.testing.assert_allclose(out.logprobs, want.max(-1), atol=1e-5)
    np.testing.assert_array_equal(out.top_ids, np.argsort(-LOGITS, axis=-1)[:, :20])
    np.testing.assert_array_equal(out.top_logprobs[:, 0], out.logprobs)  # equal floats: clients compare them
    assert np.all(out.finite)


@pytest.mark.parametrize(
    "spec",
    [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.6, "min_p": 0.05},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 3.0, "top_k": 7},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(spec):
    spec = {"temperature": 1.0, **spec}
    want = kept(LOGITS[0], **spec)
    found = np.bincount(draw_many(LOGITS[0], spec, 2048), minlength=V) / 2048
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(want)), "a token outside the kept set was drawn"
    assert np.abs(found - want).sum() < 0.35
    assert np.abs(found - want).max() < 0.06


def test_one_row_never_depends_on_its_mates():
    specs = [
        {"temperature": 1.0, "seed_low": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed_low": 2, "num_logprobs": 3},
        {"temperature": 1.3, "top_k": 9, "seed_low": 3},
        {},
        {"temperature": 1.0, "min_p": 0.1, "seed_high": 9},
        {"flags": SAMPLES | USES_PENALTIES, "presence": 1.0},
    ]
    together = draw(LOGITS, *specs)
    for i, spec in enumerate(specs):
        alone = draw(np.stack([LOGITS[i]] * 6), *[{**spec, "slot": i}] * 6)
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_rounding_of_the_logits_moves_almost_no_draw():
    """Steps of other shapes sum in another order; a draw must not hang on that."""
    logits = RNG.normal(0, 1, 20_000).astype(np.float32)
    specs = [{"temperature": 1.0, "slot": 0}] * 400
    noisy = logits + RNG.uniform(-2e-5, 2e-5, logits.shape).astype(np.float32)
    device = state(vocab=20_000)
    a, b = (
        draw(np.repeat(x[None], 400, 0), *specs, device=device, positions=np.arange(400)).token_ids
        for x in (logits, noisy)
    )
    assert (np.asarray(a) != np.asarray(b)).sum() <= 2


def test_b081_top_k_beyond_the_vocabulary_is_off():
    """B081: a top_k above the vocabulary crashed, and mixing greedy and top_k rows too."""
    base = {"temperature": 1.0, "seed_low": 5}
    want = draw(LOGITS, *[base] * 6).token_ids
    for top_k in (V - 1 + 1, V + 1, 2**31 - 1):
        np.testing.assert_array_equal(draw(LOGITS, *[{**base, "top_k": top_k}] * 6).token_ids, want)
    mixed = draw(LOGITS, {}, {**base, "top_k": V + 1}, {}, {**base, "top_k": 1}, {}, base).token_ids
    best = LOGITS.argmax(-1)
    np.testing.assert_array_equal(mixed, [best[0], want[1], best[2], best[3], best[4], want[5]])


def test_b083_keys_are_never_reused():
    """B083: the same key every step made "random" choices equal."""
    ids = draw_many(np.zeros(V, np.float32), {"temperature": 1.0, "seed_low": 11}, 4000)
    counts = np.bincount(ids, minlength=V)
    assert ((counts - 4000 / V) ** 2 / (4000 / V)).sum() < V + 5 * np.sqrt(2 * V), "not uniform"
    x = ids - ids.mean()
    assert abs((x[1:] * x[:-1]).mean() / x.var()) < 0.06, "neighbouring draws are correlated"
    other = draw_many(np.zeros(V, np.float32), {"temperature": 1.0, "seed_low": 12}, 4000)
    assert (ids == other).mean() < 0.02


@pytest.mark.parametrize("temperature", [1e-4, 1e-3, 0.01])
def test_b085_tiny_temperatures_are_greedy(temperature):
    """B085: 1e-4 overflowed half precision. Below 1e-4 the params themselves are greedy."""
    logits = LOGITS * 50
    out = draw(logits, *[{"temperature": temperature, "top_p": 0.9}] * 6)
    np.testing.assert_array_equal(out.token_ids, logits.argmax(-1))
    assert np.all(np.isfinite(out.logprobs))
    for tiny in (1e-300, 1e-45, 1e-7, 1e-5):
        assert SamplingParams(temperature=tiny).is_greedy


def load(params: SamplingParams, prompt=(5, 6, 5), output=(7, 7, 8), eos=(2,)):
    request = Request(request_id="r", prompt_token_ids=prompt, params=params, eos_token_ids=eos)
    sequence = Sequence(request, output_token_ids=list(output), slot=3)
    packed = slot.pack(sequence, V, 16)
    assert packed.shape == (slot.packed_size(V, 16),)
    return jax.jit(slot.load_slot)(state(), packed)


def test_penalties_equal_their_definition():
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.5)
    spec = {"flags": SAMPLES | USES_PENALTIES, "slot": 3, "presence": 0.7, "frequency": 0.3, "repetition": 1.5}
    logits = np.full(V, -9.0, np.float32)
    logits[[5, 6, 7, 8, 9]] = [4.0, 3.0, 4.5, -1.0, 2.9]
    # 5: 4 / 1.5 = 2.67; 6: 2; 7: 3 - .7 - .6 = 1.7; 8: lower; 9 is new and wins
    out = draw(logits[None], spec, device=load(params))
    assert int(out.token_ids[0]) == 9
    from jcb.steps.sampling import adjust

    got = np.asarray(adjust(jnp.asarray(logits[None]), rows(spec), load(params)))[0]
    np.testing.assert_allclose(
        got[[5, 6, 7, 8, 9]], [4 / 1.5, 2.0, 4.5 / 1.5 - 0.7 - 0.6, -1.5 - 0.7 - 0.3, 2.9], rtol=1e-6
    )


def test_the_smallest_repetition_penalty_does_not_overflow():
    """Logits divided by it would be infinite, and a draw among infinities takes token 0."""
    request = Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams(repetition_penalty=1e-44))
    row = ScheduledRow(Sequence(request, slot=0), 0, 0, 1, RowKind.NEW, True, (5,), (1,), 0, -1)
    shape = StepShape(2, 2, 1, True)
    limits = Limits(page_size=16, num_pages=2, max_model_len=16, vocab_size=V)
    _, packed = inputs.unpack(Packer(limits, 2).pack(StepPlan(1, (row,)), shape), shape, jnp.zeros(2, jnp.int32))
    assert jnp.isfinite(100.0 / packed.repetition[0])


def test_b093_prompt_and_output_are_told_apart_on_the_first_step():
    """B093: presence counts outputs only, repetition counts the prompt too, from the first step on."""
    from jcb.steps.sampling import adjust

    fresh = load(SamplingParams(presence_penalty=2.0), output=())
    spec = {"flags": SAMPLES | USES_PENALTIES, "slot": 3, "presence": 2.0}
    np.testing.assert_array_equal(adjust(jnp.asarray(LOGITS[:1]), rows(spec), fresh), LOGITS[:1])
    spec = {"flags": SAMPLES | USES_PENALTIES, "slot": 3, "repetition": 2.0}
    changed = np.flatnonzero(np.asarray(adjust(jnp.asarray(LOGITS[:1]), rows(spec), fresh))[0] != LOGITS[0])
    assert changed.tolist() == [5, 6]


def test_bias_and_allowed_ids():
    best = int(LOGITS[0].argmax())
    params = SamplingParams(logit_bias={best: -100.0, 17: 50.0})
    spec = {"flags": SAMPLES | USES_BIAS, "slot": 3}
    assert int(draw(LOGITS[:1], spec, device=load(params)).token_ids[0]) == 17
    allowed = tuple(range(31, 66))
    params = SamplingParams(allowed_token_ids=allowed)
    want = allowed[int(LOGITS[0][31:66].argmax())]
    assert int(draw(LOGITS[:1], spec, device=load(params)).token_ids[0]) == want
    device = load(params)
    specs = [{**spec, "temperature": 5.0}] * 64
    ids = draw(np.repeat(LOGITS[:1], 64, 0), *specs, device=device, positions=range(64)).token_ids
    assert set(np.asarray(ids).tolist()) <= set(allowed)
    assert len(set(np.asarray(ids).tolist())) > 5


def test_a_slot_without_the_flag_is_never_read():
    """What an earlier sequence left in a slot must not touch the next one."""
    device = load(SamplingParams(logit_bias={17: 99.0}, presence_penalty=2.0, min_tokens=3))
    out = draw(LOGITS[:1], {"slot": 3}, device=device)
    assert int(out.token_ids[0]) == LOGITS[0].argmax()


def test_min_tokens_holds_back_end_and_stop_ids():
    logits = LOGITS[:1].copy()
    logits[0, [2, 40]] = [90.0, 80.0]
    device = load(SamplingParams(min_tokens=9, stop_token_ids=(40,)))
    assert int(draw(logits, {"slot": 3, "flags": SAMPLES}, device=device).token_ids[0]) == 2
    held = draw(logits, {"slot": 3, "flags": SAMPLES | SUPPRESSES_STOP}, device=device)
    assert int(held.token_ids[0]) == LOGITS[0].argmax()


def test_b091_ids_beyond_the_vocabulary_touch_nothing():
    """B091: padding of the stop ids is V itself; on JAX a clamped write would have masked the last token."""
    logits = LOGITS[:1].copy()
    logits[0, V - 1] = 99.0
    device = load(SamplingParams(min_tokens=9))
    out = draw(logits, {"slot": 3, "flags": SAMPLES | SUPPRESSES_STOP}, device=device)
    assert int(out.token_ids[0]) == V - 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_b175_a_sick_row_gives_a_valid_id_and_a_flag_and_harms_nobody(bad):
    """B175: an id outside the vocabulary was fed back to the device."""
    logits = LOGITS.copy()
    logits[2] = bad
    specs = [{"temperature": 1.0, "top_p": 0.9, "seed_low": i} for i in range(6)]
    out, well = draw(logits, *specs), draw(LOGITS, *specs)
    assert np.asarray(out.finite).tolist() == [True, True, False, True, True, True]
    assert 0 <= int(out.token_ids[2]) < V
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(np.asarray(out.token_ids)[others], np.asarray(well.token_ids)[others])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("asked", [-1, 0])
def test_a_step_takes_the_likeliest_and_flags_one_bad_logit(bad, asked):
    logits = LOGITS.copy()
    logits[2, V // 2] = bad
    out = likeliest(jnp.asarray(logits), rows(*[{"num_logprobs": asked}] * 6))
    others = [0, 1, 3, 4, 5]
    assert np.asarray(out.finite).tolist() == [True, True, False, True, True, True]
    np.testing.assert_array_equal(np.asarray(out.token_ids)[others], LOGITS.argmax(-1)[others])


def test_a_row_that_draws_flags_a_bad_logit_that_it_did_not_draw():
    logits = LOGITS[:1].copy()
    logits[0, logits.argmin()] = np.nan
    assert not draw(logits, {"temperature": 1.0}).finite[0]


def test_only_rows_that_ask_get_log_probabilities():
    specs = [{"num_logprobs": 0}, {}, {"num_logprobs": 3}, {}]
    want = (LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(-1, keepdims=True))).max(-1)[:4] * [1, 0, 1, 0]
    for out in (likeliest(jnp.asarray(LOGITS[:4]), rows(*specs)), draw(LOGITS[:4], *specs)):
        np.testing.assert_allclose(out.logprobs, want, atol=1e-5)
