"""A run of the default model, recorded and replayed: the simulated run's plans are the real run's, one for one."""

import dataclasses
import time
from collections import Counter

import pytest

from jcb.bench.real_run import rerun
from jcb.config import ServeConfig
from jcb.engine.record import start_recorder
from jcb.recording import End, Recording, RecordingFile, Step
from jcb.simulate.fit import calibrate
from jcb.simulate.recorded import recorded_stats
from jcb.simulate.replay import Replay
from jcb.simulate.what_if import simulate_recording
from jcb.text.tokenizer import load_tokenizer
from jcb.types import FinishReason
from tests.e2e.real_model import Engine, checkpoint, executor, request

pytestmark = [pytest.mark.golden, pytest.mark.slow, pytest.mark.timeout(1500)]

SYSTEM = "<|im_start|>system\nYou answer in one short sentence, and then you stop.<|im_end|>\n"
QUESTIONS = (
    "What is the capital of France?",
    "Say hello.",
    "What is two plus two?",
    "Name a colour.",
    "Which animal says meow?",
    "What do bees make?",
    "Write a long story about a dragon.",
    "List all the months of the year.",
)


def prompts():
    tokenizer = load_tokenizer(checkpoint())
    for question in QUESTIONS:
        yield tokenizer.encode(f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def run(path, *, overlap):
    """Two rounds of the same questions, with forced preemptions, a client that leaves and ends by the model."""
    device = executor()
    engine = Engine(device, overlap=overlap, prefix_caching=True, preempt_every=9, max_prefill_chunk=24)
    limits = device._limits
    config = ServeConfig()
    config = dataclasses.replace(
        config,
        dtype="float32",
        scheduler=dataclasses.replace(engine.scheduler.config, max_model_len=limits.max_model_len),
        cache=dataclasses.replace(config.cache, page_size=limits.page_size, num_pages=limits.num_pages),
        engine=dataclasses.replace(config.engine, overlap=overlap),
    )
    shapes = device.registry.shapes
    engine.core.recorder = start_recorder(RecordingFile(path), config, checkpoint().config, "cpu", shapes)
    for turn in range(2):
        for number, prompt in enumerate(prompts()):
            asked = request(f"{turn}-{number}", prompt, max_tokens=40)
            engine.core.add(dataclasses.replace(asked, arrival_time=time.monotonic()))
            engine.core.step()
        engine.core.abort(f"{turn}-6", FinishReason.ABORT)
        while engine.core.has_work:
            engine.core.step()
    engine.core.recorder.close()
    return Recording.open(path)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_plan_of_a_real_run_comes_again(tmp_path, overlap):
    recording = run(tmp_path / "run.jsonl", overlap=overlap)
    replayed = Replay(recording).run()
    assert replayed.difference is None
    assert replayed.steps == sum(isinstance(event, Step) for event in recording) > 60
    for step, rows in Replay(recording).turns():
        assert rows == step.rows
    reasons = Counter(event.reason for event in recording if isinstance(event, End))
    assert reasons["abort"] == 2
    assert reasons["stop"] > 0
    assert reasons["length"] > 0
    stats = recorded_stats(recording)
    assert stats.preemptions > 0
    assert stats.cached_tokens > 100


def test_a_real_run_is_fitted_and_simulated(tmp_path):
    recording = run(tmp_path / "run.jsonl", overlap=True)
    calibration = calibrate(recording)
    real, simulated = recorded_stats(recording), simulate_recording(recording, calibration=calibration)
    assert simulated.finished == real.finished
    assert simulated.output_tokens == real.output_tokens
    assert simulated.busy == pytest.approx(real.busy, rel=0.5), "how close on a quiet machine, `make lab-check` says"


def test_the_requests_of_a_recording_run_again_under_other_knobs(tmp_path):
    recording = run(tmp_path / "run.jsonl", overlap=True)
    settings = {"scheduler.max_num_seqs": 4, "scheduler.max_num_batched_tokens": 64, "scheduler.preempt_every": 0}
    again, before = rerun(recording, settings), recorded_stats(recording)
    assert (again.finished, again.aborted) == (before.finished, before.aborted)
    assert again.output_tokens == before.output_tokens
    assert again.occupancy.maximum <= 4
    assert again.preemptions == 0
