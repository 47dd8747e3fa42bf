"""Knobs on a compiled engine: every plan they allow has its program, and tokens stay what they were."""

import pytest

from jcb.config import ServeConfig
from jcb.config_file import override
from tests.checkpoint.tiny_model import write_tiny_hf
from tests.fakes import make_request

SETTINGS = {
    "max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 65, "page_size": 16,
    "compile_cache": "", "dtype": "float32",
}  # fmt: skip
TURNS = (
    {"max_num_seqs": 1},
    {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 11, "policy": "priority"},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16, "policy": "fcfs"},
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from jcb.engine.build import load_engine

    return load_engine(override(ServeConfig(model=str(write_tiny_hf(tmp_path_factory.mktemp("tiny")))), SETTINGS))


def run(engine, turns=()):
    """Tokens of seven requests; a knob is turned every six steps."""
    answers, steps = {}, 0
    for index in range(7):
        name = f"r{index}"
        answers[name] = []
        engine.core.add(make_request(name, range(20, 24 + 7 * index), 16, temperature=0.0, ignore_eos=True))
    while engine.core.has_work:
        if turns and steps % 6 == 0:
            engine.core.scheduler.turn(turns[steps // 6 % len(turns)])
        steps += 1
        for output in engine.core.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    engine.core.scheduler.check_integrity()
    return answers


def test_no_turn_compiles_anything_or_changes_a_token(engine):
    before = run(engine)
    assert all(len(tokens) == 16 for tokens in before.values())
    assert run(engine, TURNS) == before
    assert engine.core.scheduler.stats()["preemptions"] > 0
    assert engine.metrics.compiles_after_ready.value == 0
    engine.core.scheduler.turn(TURNS[-1])
    assert run(engine) == before
