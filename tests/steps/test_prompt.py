"""The prompt program: the very values of the logits, of the tokens that were asked about and of no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcb.config import ModelConfig
from jcb.models import llama
from jcb.steps import prompt
from jcb.steps.state import init_state
from jcb.steps.step import StepStatics
from jcb.types import MAX_LOGPROBS, Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from jcb.weights.load import load_params
from pallas_kernels.layout import KVLayout
from tests.random_model import RandomCheckpoint

MODEL = ModelConfig(
    architecture="qwen3", vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position_embeddings=256, attention_bias=False, qk_norm=True,
)  # fmt: skip
TOKENS = 75
"""Of the largest step: neither whole tiles nor one."""


def row(tokens, *, wanted=None, start=0, following=-1):
    prompt_ids = (1,) * start + tuple(tokens) + (() if following < 0 else (following,))
    params = SamplingParams(prompt_logprobs=wanted)
    sequence = Sequence(Request(request_id="r", prompt_token_ids=prompt_ids, params=params))
    return ScheduledRow(sequence, 0, start, len(tokens), RowKind.NEW, following < 0, tuple(tokens), (1,), 0, following)


def plan(*rows):
    return StepPlan(1, rows)


@pytest.fixture(scope="module")
def params():
    return load_params(RandomCheckpoint(MODEL), llama.param_specs(MODEL), "float32")


@pytest.fixture(scope="module")
def program(params):
    """The compiled program with a state of known hidden states: hidden, packed → its output."""
    layout = KVLayout("cpu", "float32", MODEL.num_kv_heads, MODEL.head_dim, 4)
    statics = StepStatics(MODEL, layout)
    shape = jax.ShapeDtypeStruct((TOKENS, MODEL.hidden_size), jnp.float32)
    state = init_state(layout, 1, 2, 2, MODEL.vocab_size, shape)
    step = jax.jit(lambda params, state, packed: prompt.prompt_step(statics, params, state, packed))

    def run(hidden, packed):
        return np.asarray(step(params, state.replace(hidden=jnp.asarray(hidden)), packed)[1])

    return run


def expected(params, hidden):
    logits = np.asarray(hidden, np.float64) @ np.asarray(params.get("head", params["embedding"]), np.float64).T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("lengths", [(2, 5, 3), (1, 31, 9), (4, 32, 39), (0, 75, 0), (20, 33, 1)])
def test_values_are_those_of_the_logits(params, program, lengths):
    before, asked, after = lengths
    rng = np.random.default_rng(asked)
    hidden = rng.normal(0, 1, (TOKENS, MODEL.hidden_size)).astype(np.float32)
    ids = rng.integers(1, MODEL.vocab_size, TOKENS).tolist()
    rows = [row(ids[:before]), row(ids[before : before + asked], wanted=3, following=7), row(ids[-after:])]
    kept = [each for each, length in zip(rows, lengths, strict=True) if length]
    packed = prompt.pack(plan(*kept), TOKENS)
    assert packed[0] == asked
    found = prompt.unpack(plan(*kept), program(hidden, packed))
    index = 1 if before else 0
    assert list(found) == [index]
    want = expected(params, hidden[before : before + asked])
    targets = [*ids[before + 1 : before + asked], 7]
    assert [entry.token_id for entry in found[index]] == targets
    for entry, line, target in zip(found[index], want, targets, strict=True):
        assert entry.logprob == pytest.approx(line[target], abs=1e-4)
        assert entry.top_ids == tuple(np.argsort(-line)[:3])
        np.testing.assert_allclose(entry.top_logprobs, np.sort(line)[::-1][:3], atol=1e-4)


def test_several_rows_that_ask_are_told_apart(program):
    rng = np.random.default_rng(2)
    hidden = rng.normal(0, 1, (TOKENS, MODEL.hidden_size)).astype(np.float32)
    rows = [row([3, 4, 5], wanted=1, following=6), row([9]), row([11, 12], wanted=0, following=2)]
    found = prompt.unpack(plan(*rows), program(hidden, prompt.pack(plan(*rows), TOKENS)))
    assert {index: [entry.token_id for entry in entries] for index, entries in found.items()} == {
        0: [4, 5, 6],
        2: [12, 2],
    }
    assert [len(entry.top_ids) for entry in found[2]] == [0, 0]
    (alone,) = prompt.unpack(plan(rows[2]), program(hidden[4:], prompt.pack(plan(rows[2]), TOKENS))).values()
    assert alone == found[2], "what mates ask changes no bit"


def test_nothing_is_packed_where_no_row_asks():
    assert prompt.pack(plan(), TOKENS) is None
    assert prompt.pack(plan(row([3, 4])), TOKENS) is None
    assert prompt.pack(plan(row([3], wanted=1)), TOKENS) is None, "the last token of a prompt has nothing after it"


def test_every_packed_array_is_fresh_and_of_one_size():
    made = [prompt.pack(plan(row([3] * count, wanted=0, following=4)), TOKENS) for count in (1, 40, 75)]
    assert {len(packed) for packed in made} == {prompt.packed_size(TOKENS)}
    assert len({packed.ctypes.data for packed in made}) == 3


def test_tokens_beyond_the_asked_ones_are_not_computed(program):
    hidden = np.full((TOKENS, MODEL.hidden_size), 1.0, np.float32)
    lines = program(hidden, prompt.pack(plan(row([3] * 33, wanted=0, following=4)), TOKENS))
    assert lines.shape == (96, 1 + 2 * MAX_LOGPROBS)
    assert np.any(lines[:64] != 0, axis=1).all()
    assert not lines[64:].any()
