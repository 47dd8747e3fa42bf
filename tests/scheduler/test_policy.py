"""Who is refused at the door, and when a sequence ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcb.config import Limits, SchedulerConfig
from jcb.scheduler import policy
from jcb.scheduler.record import Record
from jcb.types import FinishReason, RequestError
from tests.fakes import Bench, make_request

LIMITS = Limits(page_size=16, num_pages=9, max_model_len=256, vocab_size=100)


def refusal(request, limits=LIMITS):
    with pytest.raises(RequestError) as caught:
        policy.check_can_ever_fit(request, limits)
    assert caught.value.status == 400
    return caught.value


def test_an_empty_prompt_is_refused():
    assert refusal(make_request("a", [])).param == "prompt"


def test_no_tokens_at_all_are_refused():
    assert refusal(make_request("a", [1], max_tokens=0)).param == "max_tokens"


def test_a_prompt_as_long_as_the_model_is_refused_with_the_numbers():
    error = refusal(make_request("a", [1] * 256, 5))
    assert error.code == "context_length_exceeded"
    assert "256 tokens" in error.message
    assert "longest admissible prompt is 255" in error.message


def test_more_pages_than_the_pool_has_are_refused_with_the_numbers():
    error = refusal(make_request("a", [1] * 120, 20))
    assert error.code == "kv_capacity_exceeded"
    assert "need 9 pages" in error.message
    assert "pool has 8" in error.message
    assert "longest admissible prompt is 108" in error.message
    policy.check_can_ever_fit(make_request("a", [1] * 108, 20), LIMITS)


def test_an_answer_larger_than_the_pool_is_refused_as_such():
    error = refusal(make_request("a", [1], 200))
    assert error.param == "max_tokens"


def test_without_a_limit_of_its_own_a_request_gets_what_pool_and_model_hold():
    request = make_request("a", [1] * 100, 156)
    request = type(request)(
        request_id="a",
        prompt_token_ids=request.prompt_token_ids,
        params=type(request.params)(max_tokens=None),
        max_tokens=156,
    )
    policy.check_can_ever_fit(request, LIMITS)
    assert policy.generation_limit(request, LIMITS) == 28


def test_the_queue_is_bounded_in_requests_and_tokens():
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_queued=3, max_queued_tokens=100)
    policy.check_queue(config, LIMITS, waiting=2, tokens=60, prompt_tokens=40)
    policy.check_queue(config, LIMITS, waiting=0, tokens=0, prompt_tokens=120)
    for waiting, tokens in ((3, 10), (1, 61)):
        with pytest.raises(RequestError, match="queue is full") as caught:
            policy.check_queue(config, LIMITS, waiting, tokens, prompt_tokens=40)
        assert caught.value.status == 429
        assert caught.value.retry_after > 0


def test_the_queue_is_bounded_by_default():
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    policy.check_queue(config, LIMITS, waiting=63, tokens=8 * 128 - 1)
    for waiting, tokens in ((64, 0), (1, 8 * 128)):
        with pytest.raises(RequestError):
            policy.check_queue(config, LIMITS, waiting, tokens)


@pytest.mark.parametrize(
    ("outputs", "min_tokens", "ignore_eos", "expected"),
    [
        ([5], 0, False, FinishReason.STOP),
        ([6], 0, False, FinishReason.STOP),
        ([7], 0, False, None),
        ([5], 1, False, None),
        ([7, 5], 1, False, FinishReason.STOP),
        ([5], 0, True, None),
        ([6], 0, True, FinishReason.STOP),
        ([7, 7, 7], 0, False, FinishReason.LENGTH),
        ([7, 7, 5], 3, False, FinishReason.LENGTH),
        ([7, 7, 5], 2, False, FinishReason.STOP),
    ],
)
def test_ends(outputs, min_tokens, ignore_eos, expected):
    request = make_request(
        "a", [1], 3, eos_token_ids=(5,), stop_token_ids=(6,), ignore_eos=ignore_eos, min_tokens=min_tokens
    )
    record = Record(request, output_token_ids=outputs, limit=3, stop_ids=policy.stop_ids(request))
    assert policy.end_after(record, outputs[-1]) is expected


def test_precedence_by_policy():
    early = make_request("a", [1], priority=5, arrival_time=1.0)
    late = make_request("b", [1], priority=1, arrival_time=2.0)
    assert policy.precedence("fcfs", early, 1) < policy.precedence("fcfs", late, 2)
    assert policy.precedence("priority", late, 2) < policy.precedence("priority", early, 1)
    assert policy.precedence("priority", early, 1) < policy.precedence("priority", early, 2)


def served(bench, names):
    """The order in which one slot serves `names`."""
    order = []
    while len(order) < len(names):
        order += [output.request_id for output in bench.core.step() if output.finish_reason is not None]
    return order


def one_slot(name, **options):
    return Bench(max_num_seqs=1, max_num_batched_tokens=64, num_pages=200, policy=name, overlap=False, **options)


def test_short_prompts_go_first_but_only_so_long():
    bench = one_slot("shortest-prompt")
    asks = (("busy", 4, 0.0), ("long", 60, 0.0), ("short", 5, 0.03), ("later", 5, 0.056))
    for name, tokens, at in asks:
        bench.add(name, [1] * tokens, max_tokens=1, arrival_time=at)
    # 60 tokens weigh 60 ms: overtaken by what comes 30 ms later and has 5, not by what comes 56 ms later
    assert served(bench, asks) == ["busy", "short", "long", "later"]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 0.2)), min_size=1, max_size=12),
)
def test_nobody_is_overtaken_from_beyond_the_bound(asks):
    bench = one_slot("shortest-prompt")
    for number, (tokens, at) in enumerate(asks):
        bench.add(str(number), [1] * tokens, max_tokens=1, arrival_time=at)
    order = [asks[int(name)] for name in served(bench, asks)]
    for position, (_, came) in enumerate(order):
        for tokens, earlier in order[position + 1 :]:
            assert came <= earlier + tokens / policy.PROMPT_TOKENS_A_SECOND


def test_the_longest_cached_prefix_goes_first_and_nobody_is_passed_for_ever():
    bench = one_slot("longest-prefix", page_size=4)
    hot = list(range(20, 40))
    bench.add("warm", hot, max_tokens=1)
    assert served(bench, ["warm"]) == ["warm"]
    bench.add("cold", [9] * 8, max_tokens=1)
    others = [f"hot {number}" for number in range(policy.MOST_PASSES + 4)]
    for number, name in enumerate(others):
        bench.add(name, [*hot, 50 + number], max_tokens=1)
    order = served(bench, ["cold", *others])
    assert order.index("cold") == policy.MOST_PASSES


def test_users_take_turns():
    bench = one_slot("fair-share")
    for number in range(4):
        bench.add(f"a{number}", [1] * 20, max_tokens=1, namespace="a")
    bench.add("b0", [1] * 20, max_tokens=1, namespace="b")
    bench.add("b1", [1] * 20, max_tokens=1, namespace="b")
    assert served(bench, range(6)) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_long_answers_count_against_their_user():
    bench = one_slot("fair-share")
    bench.add("a0", [1] * 4, max_tokens=60, namespace="a")
    assert served(bench, ["a0"]) == ["a0"]
    bench.add("a1", [1] * 4, max_tokens=1, namespace="a")
    bench.add("b0", [1] * 40, max_tokens=1, namespace="b")
    assert served(bench, range(2)) == ["b0", "a1"]


@pytest.mark.parametrize("name", ["shortest-prompt", "longest-prefix", "fair-share"])
def test_the_last_to_arrive_is_preempted_whatever_the_queue_prefers(name):
    early, late = make_request("a", [1] * 90), make_request("b", [1])
    assert policy.precedence(name, early, 1) < policy.precedence(name, late, 2)
