"""Every experiment writes its sentence, its numbers and its picture, the same for the same seed."""

import json
from typing import get_args

import pytest

from jcb import cli
from jcb.bench.experiments import (
    knobs,
    long_prompt,
    memory,
    policies,
    prefix,
    published,
    static_vs_continuous,
    why_batch,
)
from jcb.bench.experiments.catalogue import EXPERIMENTS
from jcb.bench.experiments.study import Study
from jcb.cli_experiment import Name

SMALL = {
    "why-batch": why_batch.Sizes(batches=(1, 4, 16), contexts=(64, 128), answer=8),
    "static-vs-continuous": static_vs_continuous.Sizes(slots=4, requests=12, prompt=16, mean=20),
    "long-prompt": long_prompt.Sizes(users=4, context=64, prompt=800, answer=60, budgets=(256, 64)),
    "memory": memory.Sizes(
        pool=1024, longest=256, requests=24, slots=24, prompt="30", output="exponential(40)", means=(64, 256), crowd=6
    ),
    "knobs": knobs.Sizes(seqs=(4, 16), budgets=(64, 256), requests=20, prompt="60", output="20", longest=512),
    "prefix": prefix.Sizes(users=4, requests=16, system=256, groups=2, own=32, answer=12, turns=3, budget=256),
    "policies": policies.Sizes(requests=12, chat=20, document=400, shared=200, own=20, answer=12, slots=4, budget=128),
}
SMALL["published"] = published.Sizes(
    static=SMALL["static-vs-continuous"],
    paging=SMALL["memory"],
    long=long_prompt.Sizes(users=4, context=64, prompt=800, answer=60, budgets=(64,), pool=None),
    capacity=published.Capacity(requests=12, prompt="300", output="20", longest=512, slots=8, chunk=64, rounds=3),
)
NUMBER, TEXT, OBJECT = {"type": "number"}, {"type": "string", "minLength": 1}, {"type": "object"}
SCHEMA = {
    "type": "object",
    "properties": {
        "experiment": {"enum": list(EXPERIMENTS)}, "question": TEXT, "model": TEXT, "chip": TEXT, "place": TEXT,
        "workload": TEXT, "finding": TEXT, "data": OBJECT,
    },
    "required": ["experiment", "question", "model", "chip", "place", "workload", "finding", "data"],
    "additionalProperties": False,
}  # fmt: skip


def test_every_experiment_is_tested_here_and_offered():
    assert set(SMALL) == set(EXPERIMENTS)
    assert list(get_args(Name)) == list(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_study_is_written_and_drawn(name, lab, tmp_path):
    import jsonschema

    experiment = EXPERIMENTS[name]
    study = experiment.simulate(lab, SMALL[name])
    assert study.name == name
    path = study.write(tmp_path / "out")
    assert path.name == f"{name}-h200.json"
    found = json.loads(path.read_text())
    jsonschema.validate(found, SCHEMA)
    assert Study.of_json(found).to_json() == found
    assert any(character.isdigit() for character in study.finding)
    picture = tmp_path / "out" / "picture.png"
    experiment.paint(Study.of_json(found), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < picture.stat().st_size < 250_000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_repeats(name, lab):
    first, second = (EXPERIMENTS[name].simulate(lab, SMALL[name]).to_json() for _ in range(2))
    assert first == second


def test_what_is_wrong_is_told_in_one_line(tmp_path, capsys):
    output = ["--output", str(tmp_path)]
    assert cli.main(["experiment", "why-batch", "--sim", "abacus", *output]) == 2
    assert "no chip 'abacus' is known" in capsys.readouterr().err
    assert cli.main(["experiment", "why-batch", "--sim", "v5e", *output]) == 2
    assert "weights take" in capsys.readouterr().err
