"""Step sizes, from a recording and from lengths."""

import json

import pytest

from jcb.config import CacheConfig, Limits, SchedulerConfig, ServeConfig
from jcb.plan.demand import Demand, is_recording, limits_for, read_lengths, recorded_demand, simulated_demand
from jcb.recording import Recording
from jcb.steps.shapes import Shapes
from tests.plan.recordings import write_recording

LIMITS = Limits(page_size=16, num_pages=1000, max_model_len=512, vocab_size=300)


def test_a_recording_is_counted(tmp_path):
    path = write_recording(tmp_path / "run.jsonl", [[20, 1], [1, 1], [1, 1], [20, 1], [1], []])
    demand = recorded_demand(Recording.open(path))
    assert demand.decode == {2: 2, 1: 1}
    assert demand.mixed == {(21, 2): 2}
    assert (demand.steps, demand.tokens) == (5, 2 * 21 + 5)
    assert is_recording(path)


def test_buckets_of_a_recording_are_read_back(tmp_path):
    path = write_recording(tmp_path / "run.jsonl", [[1]], token_buckets=[16, 64])
    assert Recording.open(path).scheduler_config().token_buckets == (16, 64)


def test_a_recording_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no step"):
        recorded_demand(Recording.open(write_recording(tmp_path / "run.jsonl", [])))


def test_padding_by_hand():
    """Default ladders of 8 rows and 64 tokens: decode 2, 8; tokens 16, 32, 64 in 8 rows."""
    shapes = Shapes.make(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), LIMITS)
    demand = Demand()
    for tokens, rows in [(1, 1), (3, 3), (8, 8), (17, 2), (64, 8)]:
        demand.add(tokens, rows)
    assert demand.padded(shapes) == 2 + 8 + 8 + 32 + 64
    assert demand.padded_rows(shapes) == 2 + 8 + 8 + 8 + 8


def test_equal_requests_one_client_by_hand():
    """Each: 100 prompt tokens in chunks of 64 and 36, then 4 decode steps for the rest of 5 tokens."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    demand = simulated_demand([(100, 5, 1)], config, LIMITS, requests=10, concurrency=1)
    assert demand.mixed == {(64, 1): 10, (36, 1): 10}
    assert demand.decode == {1: 40}


def test_every_token_is_scheduled_once():
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    lengths = [(30, 10, 3), (7, 40, 1), (200, 1, 2)]
    demand = simulated_demand(lengths, config, LIMITS, requests=200, seed=5)
    assert demand == simulated_demand(lengths, config, LIMITS, requests=200, seed=5)
    assert demand != simulated_demand(lengths, config, LIMITS, requests=200, seed=6)
    assert max(demand.decode) <= 8
    assert max(tokens for tokens, _ in demand.mixed) <= 64
    mean = (3 * 39 + 46 + 2 * 200) / 6  # the last token of an answer is never computed on
    many = simulated_demand(lengths, config, LIMITS, requests=2000)
    assert many.tokens / 2000 == pytest.approx(mean, rel=0.05)


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "output_tokens": 2, "count": 7}\n\n{"prompt_tokens": 9, "output_tokens": 1}\n'
    )
    lengths = read_lengths(path)
    assert lengths == [(5, 2, 7), (9, 1, 1)]
    assert not is_recording(path)
    config = ServeConfig(scheduler=SchedulerConfig(max_num_seqs=3))
    assert limits_for(lengths, config) == Limits(page_size=16, num_pages=4, max_model_len=10, vocab_size=1 << 16)
    config = ServeConfig(cache=CacheConfig(page_size=4, num_pages=9), scheduler=SchedulerConfig(max_model_len=99))
    assert limits_for(lengths, config) == Limits(page_size=4, num_pages=9, max_model_len=99, vocab_size=1 << 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no lengths"),
        ("12,3", "line 1: must be like"),
        ("[1]", "line 1: must be like"),
        (json.dumps({"prompt_tokens": 3}), "line 1: must be like"),
        (json.dumps({"prompt_tokens": 3, "output_tokens": 0}), "at least 1"),
        (json.dumps({"prompt_tokens": 3, "output_tokens": 1.5}), "whole numbers"),
    ],
)
def test_a_bad_file_of_lengths_is_named(tmp_path, text, message):
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lengths(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        is_recording(tmp_path / "nowhere")
