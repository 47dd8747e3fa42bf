"""The real compilers, without the chips: steps in place and near the floor, kernels that reach machine code.

One child process a chip compiles everything (see `compile_chip`); the tests below read what it says.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

from jcb.aot.preflight import environment
from jcb.chips import parse_topology
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.paged_attention import cases as attention_cases
from tests.aot.compile_chip import BRIEF_CASES, BRIEF_MODEL, DECODE, MODELS, PREFILL, SMALL

TOPOLOGIES = ("v5e:2x2", "v6e:2x1", "v5p:1x1x1", "tpu7x:1x1x1", "h100", "h200", "b200")
"""As many devices as hold 8 billion parameters and 131,072 tokens; both cores of a tpu7x chip would do, one does."""

KERNELS = ("v5e:2x2", "v6e:2x1", "v5p:1x1x1", "tpu7x:1x1x1", "h100", "h200")
"""Chips that have a kernel of their own; b200 takes the XLA path."""

WHOLE = ("v6e:2x1", "h200")
"""Chips for which `make test` compiles everything; a chip takes minutes, so the others are brief there and whole in
`make test-chips`.
"""

EVERY = [pytest.param(each, marks=() if each in WHOLE else pytest.mark.slow) for each in TOPOLOGIES]

pytestmark = pytest.mark.timeout(1800)


@functools.cache
def compiled(topology: str, *parts: str) -> list[dict]:
    """What the child process reports of these parts."""
    try:
        env = environment(parse_topology(topology).chip, os.environ)
    except ValueError as error:
        pytest.skip(str(error))
    result = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_chip", topology, *parts],
        env=env, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def usual(topology: str, kind: str) -> list[dict]:
    """Steps or cases of the one child process that every chip has."""
    return [line for line in compiled(topology, "steps", "cases") if line["kind"] == kind]


def check_step(topology: str, step: dict) -> None:
    """Alias bytes cover the cache, temporaries are below 3 % of it, nothing rewrites it, and a decode step moves
    at most 1.25 times the bytes of weights and live keys and values.
    """
    name = f"{step['model']} {step['program']}"
    assert not step["error"], (name, step["error"])
    assert step["alias"] >= step["cache"], name
    assert step["temporary"] < 0.03 * step["cache"], (name, step["temporary"] / step["cache"])
    assert step["moves"] == [], name
    if topology in KERNELS and step["program"] == DECODE:
        assert step["unknown_loops"] == 0, name
        assert 0.95 < step["bytes"] / step["floor"] < 1.25, (name, step["bytes"] / step["floor"])


@pytest.mark.parametrize("topology", [each for each in TOPOLOGIES if each not in WHOLE])
def test_the_other_chips_in_brief(topology):
    """A large model's decode step, in place and near its floor, and cases of every kind."""
    lines = compiled(topology, "brief")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [(step["model"], step["program"]) for step in steps] == [(BRIEF_MODEL, DECODE)]
    check_step(topology, steps[0])
    cases = [line for line in lines if line["kind"] == "case"]
    assert sorted(case["case"] for case in cases) == sorted(BRIEF_CASES)
    for case in cases:
        assert not case["error"], (case["op"], case["case"], case["error"])
        assert not case["refused"] or parse_topology(topology).chip.platform == "gpu", case


@pytest.mark.parametrize("topology", EVERY)
def test_steps_work_in_place_near_the_floor(topology):
    steps = usual(topology, "step")
    assert [(step["model"], step["program"]) for step in steps] == [*((m, DECODE) for m in MODELS), (SMALL, PREFILL)]
    for step in steps:
        check_step(topology, step)


@pytest.mark.parametrize("topology", EVERY)
def test_chunks_of_large_models_work_in_place(topology):
    steps = compiled(topology, "chunks")
    assert [(step["model"], step["program"]) for step in steps] == [(m, PREFILL) for m in MODELS if m != SMALL]
    for step in steps:
        check_step(topology, step)


@pytest.mark.parametrize("topology", EVERY)
def test_every_case_compiles(topology):
    """Every named case of both ops becomes a program, or is refused for a reason that its shape gives."""
    cases = usual(topology, "case")
    assert [case["case"] for case in cases] == [c.name for c in (*attention_cases.CASES, *write_cases.CASES)]
    for case in cases:
        assert not case["error"], (case["op"], case["case"], case["error"])


@pytest.mark.parametrize("topology", [each for each in EVERY if each.values[0] in KERNELS])
def test_kernels_serve_what_models_use(topology):
    """Bfloat16 with pages of the sizes that jcb chooses: never refused."""
    cases = [case for case in usual(topology, "case") if case["op"] == "paged_attention"]
    refused = {case["case"] for case in cases if case["refused"]}
    page = 128 if parse_topology(topology).chip.platform == "tpu" else 16
    served = [c for c in attention_cases.CASES if c.dtype == "bfloat16" and c.page_size >= page]
    assert {case.max_q_len == 1 for case in served} == {True, False}, "decode and chunks both"
    assert not refused & {case.name for case in served}
