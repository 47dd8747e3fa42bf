"""Prices that are found again in what was made from them, and files that come back as they were."""

import dataclasses
import json
import random

import numpy as np
import pytest

from jcb.recording import Recording
from jcb.recording.events import Header, Row, Step, to_json
from jcb.simulate.cost import StepWork, work_of_step
from jcb.simulate.fit import Calibration, calibrate, errors, fit_cost
from jcb.types import RowKind


def some_works(count=300, seed=0):
    rng = random.Random(seed)
    works = []
    for _ in range(count):
        rows = rng.randrange(1, 33)
        if rng.random() < 0.6:
            padded = next(size for size in (2, 8, 16, 32) if size >= rows)
            works.append(StepWork(rows, rows, padded, padded, rng.randrange(rows, 500 * rows), 0, 0.0, True))
        else:
            chunk = rng.randrange(2, 250)
            padded = next(size for size in (16, 32, 64, 128, 256, 512) if size >= rows + chunk)
            begin = rng.randrange(400)
            decode_kv, pairs = rng.randrange(1, 400 * rows), chunk * (begin + chunk / 2)
            works.append(StepWork(rows + chunk, rows, padded, 32, decode_kv, begin + chunk, pairs, False))
    return works


def price(work):
    return 0.02 + 4e-4 * work.padded_tokens + 2e-6 * work.decode_kv + 3e-7 * work.chunk_pairs


def test_prices_are_found_again():
    works = some_works()
    times = np.array([price(work) for work in works])
    fit = errors(fit_cost(works, times), works, times)
    assert fit.median_error < 0.01
    assert fit.r_squared > 0.999
    fresh = some_works(seed=1)
    assert errors(fit_cost(works, times), fresh, np.array([price(work) for work in fresh])).median_error < 0.01


def test_noise_and_disturbed_steps_do_little_harm():
    rng = random.Random(3)
    works = some_works()
    times = np.array([price(w) * rng.uniform(0.9, 1.1) * (6 if rng.random() < 0.05 else 1) for w in works])
    fresh = some_works(seed=1)
    fit = errors(fit_cost(works, times), fresh, np.array([price(work) for work in fresh]))
    assert fit.median_error < 0.05


def test_a_program_that_is_slower_than_its_neighbours_keeps_its_own_factor():
    works = some_works()
    times = np.array([price(work) * (1.4 if work.padded_tokens == 64 else 1.0) for work in works])
    cost = fit_cost(works, times)
    slow = [work for work in works if work.padded_tokens == 64]
    assert errors(cost, slow, np.array([1.4 * price(work) for work in slow])).median_error < 0.05


def test_prices_are_never_negative():
    works = some_works()
    times = np.array([0.05 - 1e-6 * work.decode_kv / 100 for work in works])
    cost = fit_cost(works, times)
    assert min(cost.prices) >= 0


# ---- from recordings


def write_recording(path, count=60):
    config = {"scheduler": {}, "cache": {"page_size": 16}, "dtype": "float32"}
    lines = [Header(model="m", vocab_size=9, platform="cpu", started_at=0.0, config=config).to_json()]
    rng, t = random.Random(0), 0.0
    for number in range(1, count + 1):
        rows = tuple(Row(i, i, rng.randrange(300), 1, RowKind.CONTINUED, True) for i in range(rng.randrange(1, 17)))
        bucket = next(size for size in (2, 8, 16) if size >= len(rows))
        step = Step(step=number, t=t, rows=rows, bucket=(bucket, bucket, 8), host=0.003 + 1e-4 * len(rows), wait=0.05,
                    before=0.001, dispatch=0.001)  # fmt: skip
        seconds = price(work_of_step(step)) if number > 1 else 9.0
        lines.append(to_json(dataclasses.replace(step, device=seconds)))
        t += step.host + step.wait + 0.002
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Recording.open(path)


def test_a_recording_tells_device_and_host(tmp_path):
    calibration = calibrate(write_recording(tmp_path / "r.jsonl"))
    assert calibration.fit.median_error < 0.01
    assert calibration.fit.steps == 59, "the first step pays for first uses"
    assert calibration.host.before(10) == pytest.approx(0.001)
    assert calibration.host.dispatch(10) == pytest.approx(0.001)
    assert calibration.host.after(10) == pytest.approx(0.001 + 10e-4 + 0.002, rel=0.01)
    assert (calibration.model, calibration.platform, calibration.dtype) == ("m", "cpu", "float32")


def test_a_calibration_comes_back_from_its_file(tmp_path):
    calibration = calibrate(write_recording(tmp_path / "r.jsonl"))
    calibration.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == calibration


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "no calibration of version 2"), ("[", "c.json"), ('{"jcb_calibration": 1, "features": []}', "no calib")],
)
def test_what_is_no_calibration_is_told(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")


def test_too_few_steps_are_refused_with_their_number(tmp_path):
    with pytest.raises(ValueError, match="holds 9 steps; a calibration needs 20"):
        calibrate(write_recording(tmp_path / "r.jsonl", count=10))
