"""From token ids to text, stop strings and ends."""

import pytest

from jcb.engine.choice import Choice
from jcb.engine.output import OutputProcessor
from jcb.metrics import EngineMetrics
from jcb.types import FinishReason, Logprobs, Request, RequestError, SamplingParams, SequenceOutput
from tests.fake_model import byte_tokenizer


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def started(tokenizer, **params):
    clock, metrics = Clock(), EngineMetrics()
    processor = OutputProcessor(tokenizer, metrics=metrics, clock=clock)
    request = Request(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(**params), arrival_time=99.0)
    processor.add(request, index=3)
    return processor, clock, metrics


def token(*ids, **fields):
    return SequenceOutput("a", ids, tuple(Logprobs(i, -1.0) for i in ids), **fields)


def test_text_comes_by_increments_and_the_end_once(tokenizer):
    processor, _, _ = started(tokenizer)
    (first,), stopped = processor.process([token(104)])
    assert (first.text, first.token_ids, first.index, first.finish_reason, stopped) == ("h", (104,), 3, None, [])
    (last,), stopped = processor.process([token(105, finish_reason=FinishReason.LENGTH)])
    assert (last.text, last.finish_reason, stopped, len(processor)) == ("i", FinishReason.LENGTH, [], 0)
    assert processor.process([token(105), token(105, finish_reason=FinishReason.ABORT)]) == ([], [])


def test_a_stop_string_ends_it_and_the_loop_hears(tokenizer):
    processor, _, _ = started(tokenizer, stop=("lo w",))
    results, stopped = processor.process([token(*b"hel"), token(*b"lo wor")])
    assert stopped == ["a"]
    assert "".join(r.text for r in results) == "hel"
    assert results[-1].finish_reason is FinishReason.STOP
    assert results[-1].stop_reason == "lo w"
    assert results[-1].token_ids == tuple(b"lo w")
    assert len(results[-1].logprobs) == 4
    assert processor.process([token(1)]) == ([], [])


def test_a_stop_string_in_the_last_token_needs_no_abort(tokenizer):
    processor, _, _ = started(tokenizer, stop=("b",))
    results, stopped = processor.process([token(97), token(98, finish_reason=FinishReason.LENGTH)])
    assert (results[-1].finish_reason, results[-1].stop_reason, stopped) == (FinishReason.STOP, "b", [])


def test_min_tokens_keeps_stop_strings_off(tokenizer):
    processor, _, _ = started(tokenizer, stop=("a",), min_tokens=2)
    results, stopped = processor.process([token(97), token(97)])
    assert ([r.text for r in results], stopped) == (["a", "a"], [])
    _, stopped = processor.process([token(97)])
    assert stopped == ["a"]


def test_held_text_is_released_at_the_end(tokenizer):
    processor, _, _ = started(tokenizer, stop=("abc",))
    results, _ = processor.process([token(97), token(98, finish_reason=FinishReason.LENGTH)])
    assert [r.text for r in results] == ["", "ab"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_text_only_when_asked_for(tokenizer, include):
    processor, _, _ = started(tokenizer, stop_token_ids=(98,), include_stop_str_in_output=include)
    (result,), _ = processor.process([token(97, 98, finish_reason=FinishReason.STOP, stop_token_id=98)])
    assert result.text == ("ab" if include else "a")
    assert (result.token_ids, result.stop_reason) == ((97, 98), 98)
    processor, _, _ = started(tokenizer)
    (result,), _ = processor.process([token(97, 98, finish_reason=FinishReason.STOP, stop_token_id=98)])
    assert result.stop_reason is None


def test_prompt_logprobs_come_once_and_whole(tokenizer):
    processor, _, _ = started(tokenizer, prompt_logprobs=0)
    entries = [Logprobs(i, -1.0) for i in range(3)]
    results, _ = processor.process(
        [
            SequenceOutput("a", prompt_logprobs=tuple(entries[:2])),
            SequenceOutput("a", (97,), prompt_logprobs=(entries[2],)),
            token(98),
        ]
    )
    assert [list(r.prompt_logprobs) for r in results] == [entries, []]


def test_times_and_counts(tokenizer):
    processor, clock, metrics = started(tokenizer)
    processor.process([token(97)])
    clock.now = 102.0
    processor.process([token(97)])
    clock.now = 101.0  # a clock that steps back
    processor.process([token(97, 97, finish_reason=FinishReason.LENGTH)])
    assert metrics.time_to_first_token_seconds.total == 1.0
    assert metrics.inter_token_latency_seconds.count == 3
    assert metrics.inter_token_latency_seconds.total == 2.0
    assert metrics.generation_tokens.value == 4
    assert metrics.prompt_tokens.value == 2
    assert metrics.request_success.by_label == {"length": 1}


def test_an_error_is_handed_on_and_counted(tokenizer):
    processor, _, metrics = started(tokenizer)
    error = RequestError("no", status=500)
    (result,), stopped = processor.process([SequenceOutput("a", finish_reason=FinishReason.ERROR, error=error)])
    assert (result.error, stopped) == (error, [])
    assert metrics.request_errors.by_label == {"500": 1}


def test_a_choice_gathers_its_outputs(tokenizer):
    processor, _, _ = started(tokenizer)
    choice = Choice()
    for outputs in ([token(104)], [token(105, finish_reason=FinishReason.LENGTH, num_cached_tokens=1)]):
        for result in processor.process(outputs)[0]:
            choice.absorb(result)
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("hi", [104, 105], FinishReason.LENGTH)
    assert (len(choice.logprobs), choice.num_cached_tokens) == (2, 1)
