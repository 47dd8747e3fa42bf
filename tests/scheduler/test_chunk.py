"""Chunks that shrink along a prompt: every step costs about the same, no token changes, nobody starves."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcb.config import Limits, SchedulerConfig, ServeConfig, replace
from jcb.engine.core import EngineCore
from jcb.engine.memory import Device
from jcb.engine.resolve import resolve
from jcb.models.presets import PRESETS
from jcb.scheduler.chunk import constant_cost, equivalent
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.clock import VirtualClock
from jcb.simulate.executor import SimExecutor
from jcb.types import StepPlan
from tests.fakes import Bench, make_request, reference_tokens

HALF = 300
sizes = st.integers(1, 1 << 20)


def cost(q_len: int, position: int, half: int = HALF) -> float:
    return q_len * (1 + (position + q_len / 2) / half)


def cost_of(plan: StepPlan) -> float:
    """Seconds: 10 ms a step, and what each token costs."""
    return 0.010 + 1e-4 * sum(cost(row.q_len, row.start) for row in plan.rows if row.q_len > 1)


@given(most=sizes, position=st.integers(0, 1 << 20), half=sizes)
def test_a_chunk_costs_what_the_first_one_does_or_a_little_less(most, position, half):
    chunk = constant_cost(most, position, half)
    assert 1 <= chunk <= most
    assert chunk == 1 or cost(chunk, position, half) <= cost(most, 0, half) * (1 + 1e-9)
    assert cost(chunk + 1, position, half) > cost(most, 0, half) * (1 - 1e-9)


@given(q_len=sizes, position=st.integers(0, 1 << 20), half=sizes)
def test_a_charge_is_the_cost_in_first_tokens(q_len, position, half):
    charge = equivalent(q_len, position, half)
    assert charge >= q_len
    assert charge == q_len or cost(charge, 0, half) <= cost(q_len, position, half) * (1 + 1e-9)
    assert cost(charge + 1, 0, half) > cost(q_len, position, half) * (1 - 1e-9)
    assert equivalent(q_len, 0, half) == q_len


def step_seconds(prompts: tuple[int, ...], **config) -> list[tuple[float, int]]:
    """(cost, tokens) of each step while prompts are computed, on a pretended device."""
    limits = Limits(page_size=16, num_pages=2000, max_model_len=9000, vocab_size=1000)
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, **config)
    clock, seen = VirtualClock(), []

    def recording(plan: StepPlan) -> float:
        seen.append((cost_of(plan), plan.num_tokens))
        return cost_of(plan)

    core = EngineCore(
        Scheduler(settings, limits, enable_prefix_caching=False),
        SimExecutor(clock, recording, vocab_size=1000), clock=clock,
    )  # fmt: skip
    for number, length in enumerate(prompts):
        core.add(make_request(f"{number}", range(length), max_tokens=2))
    while core.has_work:
        core.step()
    return [(seconds, tokens) for seconds, tokens in seen if tokens > len(prompts)]


@pytest.mark.parametrize("prompts", [(4000,), (3000, 2000), (2500, 700, 900)])
def test_step_time_stays_flat_where_it_grew(prompts):
    *fixed, _ = [seconds for seconds, _ in step_seconds(prompts)]
    *flat, _ = [
        seconds for seconds, _ in step_seconds(prompts, chunk_policy="constant-latency", chunk_half_position=HALF)
    ]
    assert max(fixed) > 4 * fixed[0]
    assert max(flat) < 1.03 * flat[0]
    if len(prompts) == 1:
        assert min(flat) > 0.97 * flat[0]


def test_max_prefill_chunk_is_the_first_chunk():
    steps = step_seconds((2000,), chunk_policy="constant-latency", chunk_half_position=HALF, max_prefill_chunk=64)
    tokens = [tokens for _, tokens in steps]
    assert tokens[0] == 64
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-2] < 16


def test_tokens_do_not_depend_on_the_policy():
    bench = Bench(
        max_num_batched_tokens=16, chunk_policy="constant-latency", chunk_half_position=9, num_pages=24, preempt_every=5
    )
    prompts = {f"r{n}": [(n * 31 + i) % 101 for i in range(20 + 7 * n)] for n in range(5)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 12)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens[name] == reference_tokens(prompt, 12, bench.limits.vocab_size)
    assert not bench.executor.violations


def test_the_position_comes_from_the_model_or_is_asked_for():
    model, device = PRESETS["smollm2-135m"], Device("cpu", 8 << 30)
    config = resolve(ServeConfig(), model, device, 1)
    assert config.scheduler.chunk_half_position == 2 * 106_168_320 // 30 // (4 * 9 * 64)
    assert config.scheduler.bucket_ladder == "fine"
    assert resolve(ServeConfig(), model, Device("tpu", 8 << 30), 1).scheduler.bucket_ladder == "coarse"
    own = resolve(replace(ServeConfig(), "scheduler", chunk_half_position=77), model, device, 1)
    assert own.scheduler.chunk_half_position == 77
    limits = Limits(page_size=16, num_pages=9, max_model_len=99, vocab_size=9)
    unresolved = dataclasses.replace(SchedulerConfig(), chunk_policy="constant-latency")
    with pytest.raises(ValueError, match="needs chunk_half_position"):
        Scheduler(unresolved, limits, enable_prefix_caching=False)
