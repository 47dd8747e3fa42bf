"""The default model against an independent implementation, in float32, however the work is cut and mixed.

`make golden` runs every prompt in every mode; `make test` leaves the longest ones to the mode with all in one batch.
JCB_GOLDEN=full is the former, JCB_GOLDEN=long its difference to the latter: only the longest prompts.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.real_model import Engine, executor, logprob_array, request

pytestmark = [pytest.mark.golden, pytest.mark.timeout(3000)]

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
WHICH = os.environ.get("JCB_GOLDEN", "")
FULL = WHICH in ("full", "long")
LONG_PROMPT = 100  # tokens
TOLERANCE = 2e-3  # nats, float32 against float32
MARGIN = 1e-3  # below it two implementations may pick different tokens

assert all(case["min_margin"] > MARGIN for case in CASES), "ids must then be equal everywhere"


def cases(which: str = WHICH) -> dict[str, dict]:
    named = {f"{i}-{case['kind']}": case for i, case in enumerate(CASES)}
    if which == "full":
        return named
    return {name: case for name, case in named.items() if (len(case["prompt_ids"]) > LONG_PROMPT) == (which == "long")}


def ask(name: str, case: dict, **params):
    return request(name, case["prompt_ids"], max_tokens=48, **params)


def check(answers, chosen) -> float:
    worst = 0.0
    for name, case in chosen.items():
        answer = answers[name]
        assert answer.token_ids == case["output_ids"], name
        worst = max(worst, float(np.abs(logprob_array(answer) - case["logprobs"]).max()))
        for got, want in zip(answer.logprobs, case["top5"], strict=True):
            assert set(got.top_ids[:2]) == {token for token, _ in want[:2]}
            np.testing.assert_allclose(got.top_logprobs, [logprob for _, logprob in want], atol=TOLERANCE)
    assert worst < TOLERANCE
    print(f" {len(chosen)} cases, worst logprob difference {worst:.1e}", end=" ")
    return worst


def run_together(chosen, engine: Engine, record_property) -> None:
    worst = check(engine.run(ask(name, case) for name, case in chosen.items()), chosen)
    record_property("worst_logprob_difference", worst)


def test_alone(record_property):
    chosen = cases() if FULL else dict(list(cases().items())[::3])
    engine, worst = Engine(executor()), 0.0
    for name, case in chosen.items():
        worst = max(worst, check(engine.run([ask(name, case)]), {name: case}))
    record_property("worst_logprob_difference", worst)


def test_all_together_long_prompts_too(record_property):
    run_together(cases("full"), Engine(executor()), record_property)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_chunks(chunk, record_property):
    run_together(cases(), Engine(executor(), max_prefill_chunk=chunk), record_property)


def test_prefix_cache_cold_then_warm(record_property):
    chosen = cases()
    engine = Engine(executor(), prefix_caching=True)
    cold = engine.run(ask(name, case) for name, case in chosen.items())
    warm = engine.run(ask(name, case) for name, case in chosen.items())
    record_property("worst_logprob_difference", max(check(cold, chosen), check(warm, chosen)))
    for name, case in chosen.items():
        assert warm[name].num_cached == (len(case["prompt_ids"]) - 1) // 16 * 16


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_preemption_every_3_steps(overlap, record_property):
    engine = Engine(executor(), preempt_every=3, overlap=overlap)
    run_together(cases(), engine, record_property)
    assert engine.scheduler.stats()["preemptions"] > 5


def test_forced_preemption_with_prefix_cache_and_chunks(record_property):
    engine = Engine(executor(), preempt_every=3, prefix_caching=True, max_prefill_chunk=7)
    run_together(cases(), engine, record_property)


@pytest.mark.parametrize("page_size", [1, 64])
def test_other_page_sizes(page_size, record_property):
    chosen = cases()
    run_together(chosen, Engine(executor(page_size=page_size, max_num_seqs=8, budget=64)), record_property)


@pytest.mark.parametrize("weights", ["as-shipped", "dense"])
def test_weights_packed_or_dense(weights, record_property):
    """The one that is not the default here, and the default with small programs."""
    run_together(cases(), Engine(executor(max_num_seqs=8, budget=64, weights=weights)), record_property)


def test_overlap_off(record_property):
    run_together(cases(), Engine(executor(), overlap=False), record_property)


@pytest.mark.parametrize("chunk", [0, 3])
def test_prompt_logprobs(chunk, record_property):
    chosen = {name: case for name, case in cases().items() if case.get("prompt_logprobs")}
    engine = Engine(executor(), max_prefill_chunk=chunk)
    answers = engine.run(ask(name, case, prompt_logprobs=1) for name, case in chosen.items())
    worst = 0.0
    for name, case in chosen.items():
        got = [entry.logprob for entry in answers[name].prompt_logprobs]
        want = [x for x in case["prompt_logprobs"] if x is not None]
        assert len(got) == len(want) == len(case["prompt_ids"]) - 1
        worst = max([worst, *(abs(a - b) for a, b in zip(got, want, strict=True))])
        assert [entry.token_id for entry in answers[name].prompt_logprobs] == case["prompt_ids"][1:]
    assert worst < TOLERANCE
    record_property("worst_logprob_difference", worst)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"dtype": "bfloat16"}, 0.05),
        ({"weights": "as-shipped", "activations": "int8"}, 0.05),
        ({"kv_dtype": "bfloat16"}, 0.05),
    ],
)
def test_rounded_steps_stay_near_float32(record_property, settings, bound):
    """Log-probabilities of the reference's own tokens, given as a prompt, so that one early tie cannot spread."""
    chosen = cases()
    engine = Engine(executor(max_num_seqs=8, budget=64, **settings))
    requests = []
    for name, case in chosen.items():
        prompt = [*case["prompt_ids"], *case["output_ids"]]
        requests.append(request(name, prompt, max_tokens=1, prompt_logprobs=0))
    answers = engine.run(requests)
    differences = []
    for name, case in chosen.items():
        got = [entry.logprob for entry in answers[name].prompt_logprobs][len(case["prompt_ids"]) - 1 :]
        differences += [abs(a - b) for a, b in zip(got, case["logprobs"], strict=True)]
    mean = float(np.mean(differences))
    record_property("mean_logprob_difference", mean)
    print(f"{settings}: mean absolute logprob difference {mean:.4f} over {len(differences)} tokens")
    assert 1e-4 < mean < bound
