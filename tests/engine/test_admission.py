"""What the engine lets in, number by number."""

import dataclasses
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jcb.engine.admission import ModelInfo, choice_seed, make_requests, validate
from jcb.types import RequestError, SamplingParams

INFO = ModelInfo(name="m", vocab_size=300, max_model_len=64, eos_token_ids=(299,))


def make(prompt=(1, 2, 3), params=None, **kwargs):
    arguments = {"model": INFO, "request_id": "r", "rng": random.Random(0)} | kwargs
    return make_requests(prompt, params or SamplingParams(), **arguments)


def refusal(**fields):
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(**fields), INFO)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300
    return caught.value.param


WRONG = [math.nan, math.inf, -math.inf, True, "1", None, [], 2**63, -(2**63), 10**400]
INTEGERS = ("n", "min_tokens", "top_k", "max_tokens", "seed", "logprobs", "prompt_logprobs")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("value", WRONG, ids=lambda v: str(v)[:10])
@pytest.mark.parametrize("field", FLOATS)
def test_a_float_must_be_a_finite_number_in_range(field, value):
    assert refusal(**{field: value}) == field


@pytest.mark.parametrize("value", [math.nan, 1.0, True, "1", [], -(2**63) - 1], ids=str)
@pytest.mark.parametrize("field", INTEGERS)
def test_an_integer_must_be_a_whole_number_in_range(field, value):
    assert refusal(**{field: value}) == field


def test_numbers_at_the_bounds_are_taken():
    for fields in (
        {"temperature": 0},
        {"temperature": 10},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 10},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 16},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": (0, 299) * 32},
        {"logit_bias": {0: -100, 299: 100}},
        {"allowed_token_ids": (0,)},
    ):
        validate(SamplingParams(**fields), INFO)


def test_top_k_that_takes_all_is_off():
    for given_, taken in ((-1, 0), (0, 0), (1, 1), (299, 299), (300, 0), (2**63, 0), (10**30, 0)):
        assert validate(SamplingParams(top_k=given_), INFO).top_k == taken


def test_max_tokens_is_what_was_asked_or_what_is_left():
    assert make(params=SamplingParams(max_tokens=None))[0].max_tokens == 61
    assert make(params=SamplingParams(max_tokens=61))[0].max_tokens == 61
    with pytest.raises(RequestError, match="64 tokens, but 65 were requested: 3 in the prompt and 62"):
        make(params=SamplingParams(max_tokens=62))
    with pytest.raises(RequestError, match="64 in the prompt") as caught:
        make(prompt=[1] * 64)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="min_tokens"):
        make(params=SamplingParams(max_tokens=4, min_tokens=5))


def test_ids_that_all_end_the_answer_cannot_wait_for_min_tokens():
    """Every id would be forbidden at first, and the one taken would be none of those allowed."""
    ends = SamplingParams(allowed_token_ids=(299, 5), stop_token_ids=(5,), min_tokens=1)
    with pytest.raises(RequestError) as caught:
        make(params=ends)
    assert caught.value.param == "allowed_token_ids"
    for fields in ({"min_tokens": 0}, {"ignore_eos": True}, {"stop_token_ids": ()}):
        assert make(params=dataclasses.replace(ends, **fields))


@pytest.mark.parametrize("prompt", [[], [-1], [300], [2**63], [True], [1.0], ["a"]], ids=str)
def test_a_prompt_holds_ids_of_the_vocabulary(prompt):
    with pytest.raises(RequestError) as caught:
        make(prompt=prompt)
    assert caught.value.param == "prompt"


def test_choices_share_all_but_id_and_seed():
    requests = make(params=SamplingParams(n=4, seed=1), priority=3, namespace="a/b", arrival_time=9.0)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert len({request.seed for request in requests}) == 4
    alike = [dataclasses.replace(request, request_id="", seed=0) for request in requests]
    assert all(request == alike[0] for request in alike)
    assert requests[0].eos_token_ids == (299,)
    assert (requests[0].priority, requests[0].namespace, requests[0].arrival_time) == (3, "a/b", 9.0)
    assert make(params=SamplingParams(ignore_eos=True))[0].eos_token_ids == ()


def test_b089_seeds():
    seeded = [make(params=SamplingParams(seed=7), rng=random.SystemRandom())[0].seed for _ in range(3)]
    assert len(set(seeded)) == 1
    fresh = {make(rng=random.SystemRandom())[0].seed for _ in range(20)}
    assert len(fresh) == 20
    assert make(rng=random.Random(3))[0].seed == make(rng=random.Random(3))[0].seed


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_choice_seeds_are_64_bits_and_differ(seed, index):
    value = choice_seed(seed, index)
    assert 0 <= value < 2**64
    assert value == choice_seed(seed, index) != choice_seed(seed, index + 1)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text drawn makes a table of all characters
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), scalars, max_size=4))
def test_anything_is_taken_or_refused_and_never_crashes(fields):
    sized = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids")
    fields = {k: v for k, v in fields.items() if k not in sized}
    param, params = None, None
    try:
        params = validate(SamplingParams(**fields), INFO)
    except RequestError as error:
        param = error.param
    if params is None:
        assert param in fields
    else:
        assert math.isfinite(params.temperature)
        assert 0 <= params.top_k < INFO.vocab_size
