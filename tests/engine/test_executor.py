"""The device half on a tiny model: in place, compiled once, exact under every mix."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jcb.checkpoint.reader import open_checkpoint
from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.engine.executor import DeviceExecutor
from jcb.models import llama
from jcb.scheduler.scheduler import Scheduler
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from jcb.weights.load import load_params
from pallas_kernels.layout import KVLayout
from tests.checkpoint.tiny_model import EOS, VOCAB, write_tiny_gguf

SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
LIMITS = Limits(page_size=4, num_pages=4097, max_model_len=256, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    config = checkpoint.config
    statics = StepStatics(config, KVLayout("cpu", "float32", config.num_kv_heads, config.head_dim, LIMITS.page_size))
    registry = Registry(statics, SCHEDULER, LIMITS, "float32")
    seen = []
    registry.compile_all(lambda stage, done, total: seen.append((stage, done, total)))
    assert seen[-1] == ("compile", len(registry), len(registry))
    device = DeviceExecutor(registry, load_params(checkpoint, llama.param_specs(config), "float32"), LIMITS, 8)
    device.warm_up()
    return device


def core(executor, *, overlap=True, caching=True, **settings) -> EngineCore:
    executor.reset()
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    return EngineCore(
        Scheduler(SchedulerConfig(**config), LIMITS, enable_prefix_caching=caching), executor, overlap=overlap
    )


def random_request(rng: random.Random, name: str) -> Request:
    """A request that may use any feature of sampling."""
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        min_tokens=rng.choice([0, 3]),
        logit_bias=rng.choice([{}, {5: 3.0, 9: -100.0}]),
        allowed_token_ids=rng.choice([None, None, tuple(range(3, 200))]),
        logprobs=rng.choice([None, 0, 4]),
        prompt_logprobs=rng.choice([None, None, 2]),
    )
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 7, 30, 60])))
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, eos_token_ids=(EOS,), seed=rng.getrandbits(64),
        max_tokens=rng.choice([1, 5, 20]),
    )  # fmt: skip


def run(engine: EngineCore, requests) -> dict[str, tuple]:
    answers: dict[str, list] = {}
    for request in requests:
        answers[request.request_id] = [[], [], [], None]
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            answer = answers[output.request_id]
            answer[0] += output.token_ids
            answer[1] += output.logprobs
            answer[2] += output.prompt_logprobs
            answer[3] = output.finish_reason or answer[3]
            assert output.error is None
    engine.scheduler.check_integrity()
    return {name: tuple(answer) for name, answer in answers.items()}


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [random_request(rng, f"r{i}") for i in range(count)]


def test_every_step_writes_the_cache_in_place(executor):
    """The alias covers the whole cache and temporaries are far below it: a hidden copy shows only in the latter."""
    cache = executor._state.kv_pages.nbytes
    for program in executor.registry.programs.values():
        if program.name != "init":
            assert program.alias_bytes >= cache, program.name
            assert program.temp_bytes < cache // 4, program.name
    engine = core(executor)
    pointer = executor.cache_pointer
    run(engine, requests(6))
    assert executor.cache_pointer == pointer


def test_no_compiles_over_2000_mixed_steps(executor):
    engine, rng = core(executor, preempt_every=17), random.Random(3)
    executor.guard.arm()
    steps = added = 0
    while steps < 2000:
        if engine.scheduler.num_waiting < 2:
            engine.add(random_request(rng, f"n{added}"))
            added += 1
        if rng.random() < 0.02 and added:
            engine.abort(f"n{rng.randrange(added)}")
        engine.step()
        steps += 1
    assert executor.guard.count == 0
    assert added > 100
    with jax.log_compiles(False):
        jax.jit(lambda x: x + 1.5)(np.float32(1))
    assert executor.guard.count == 1, "the guard does see compilations"


def test_answers_do_not_depend_on_chunks_cache_overlap_or_preemption(executor):
    want = run(core(executor, caching=False, overlap=False), requests(24))
    assert len({answer[0][0] for answer in want.values() if answer[0]}) > 5
    for settings in (
        {"overlap": True},
        {"max_prefill_chunk": 1},
        {"max_prefill_chunk": 7, "caching": True},
        {"preempt_every": 3, "caching": True},
        {"preempt_every": 2, "overlap": False, "max_prefill_chunk": 5},
        {"admission": "static"},
        {"admission": "reserve"},
        {"policy": "priority"},
    ):
        got = run(core(executor, **settings), requests(24))
        for name, answer in want.items():
            assert got[name][0] == answer[0], (settings, name)
            assert got[name][3] == answer[3], (settings, name)
            for a, b in zip(got[name][1] + got[name][2], answer[1] + answer[2], strict=True):
                assert a.token_id == b.token_id
                assert abs(a.logprob - b.logprob) < 1e-4


def test_ids_out_of_range_are_refused_before_dispatch(executor):
    core(executor)

    def plan(pages=(1,), tokens=(5,), slot=0):
        sequence = Sequence(Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams()))
        return StepPlan(1, (ScheduledRow(sequence, slot, 0, len(tokens), RowKind.NEW, True, tokens, pages, 0, -1),))

    for bad in (
        plan(pages=(0,)),
        plan(pages=(LIMITS.num_pages,)),
        plan(tokens=(VOCAB,)),
        plan(tokens=(-2,)),
        plan(tokens=(5,) * 5),
        plan(slot=8),
    ):
        with pytest.raises(ValueError, match=r"outside|cannot hold|out of range"):
            executor.dispatch(bad)
    assert executor.collect(executor.dispatch(plan())).finite[0], "a refused plan leaves the device as it was"


def test_a_failing_step_ends_only_its_culprit(executor):
    """One request whose step raises: the others end with the tokens they have alone."""
    want = run(core(executor), requests(8))
    engine = core(executor)
    dispatch = executor.dispatch

    def sabotaged(plan):
        if any(row.sequence.request_id == "bad" and row.start > 0 for row in plan.rows):
            raise RuntimeError("out of memory while running the step")
        return dispatch(plan)

    executor.dispatch = sabotaged
    try:
        bad = Request(request_id="bad", prompt_token_ids=(4, 5, 6), params=SamplingParams(temperature=0), max_tokens=9)
        for request in [*requests(8), bad]:
            engine.add(request)
        ends, tokens = {}, {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    assert output.request_id not in ends
                    ends[output.request_id] = output
    finally:
        del executor.dispatch
    assert ends.pop("bad").error.status == 500
    assert set(ends) == set(want)
    for name in want:
        assert tokens[name] == want[name][0]
    engine.scheduler.check_integrity()


def test_host_arrays_may_be_overwritten_after_collect_only(executor, monkeypatch):
    """B039: the packed array may be the device's own buffer on CPU, so every step must get a fresh one."""
    seen = []
    pack = executor._packer.pack

    def spying(*args):
        seen.append(pack(*args))
        return seen[-1]

    monkeypatch.setattr(executor._packer, "pack", spying)
    run(core(executor), requests(3))
    assert len({array.ctypes.data for array in seen}) == len(seen) > 3


def test_b025_turning_the_prefix_cache_on_changes_no_token(executor):
    prompt = tuple(random.Random(25).randrange(3, VOCAB) for _ in range(100))
    found = set()
    for caching in (False, True):
        engine = core(executor, caching=caching)
        for turn in range(4):
            request = Request(
                request_id=f"{turn}", prompt_token_ids=prompt, params=SamplingParams(temperature=0), max_tokens=30
            )
            found.add(tuple(run(engine, [request])[f"{turn}"][0]))
        assert (engine.scheduler.stats()["prefix_hit_tokens"] > 0) == caching
    assert len(found) == 1


def test_b079_prompt_logprobs_of_any_length_compile_nothing_and_stay_small(executor):
    """B079: full rows of the vocabulary went to the host, and every new length compiled."""
    rng, engine = random.Random(79), core(executor)
    executor.guard.arm()
    seen = []
    collect = executor.collect
    executor.collect = lambda handle: seen.append(handle.prompt) or collect(handle)
    try:
        for number in range(50):
            prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 120)))
            params = SamplingParams(temperature=0, prompt_logprobs=3)
            request = Request(request_id=f"{number}", prompt_token_ids=prompt, params=params, max_tokens=1)
            assert len(run(engine, [request])[f"{number}"][2]) == len(prompt) - 1
    finally:
        del executor.collect
    assert executor.guard.count == 0
    assert {array.shape[1] for array in seen if array is not None} == {41}, "a few numbers a token, never a row of V"


def test_the_prompt_program_runs_only_for_those_who_ask_and_chunks_change_nothing(executor, monkeypatch):
    runs = []
    program = executor.registry.programs["prompt"]
    counted = dataclasses.replace(program, call=lambda *args: runs.append(1) or program.call(*args))
    monkeypatch.setitem(executor.registry.programs, "prompt", counted)
    prompt = tuple(random.Random(7).randrange(3, VOCAB) for _ in range(50))

    def ask(wanted, **settings):
        params = SamplingParams(temperature=0, prompt_logprobs=wanted)
        request = Request(request_id="r", prompt_token_ids=prompt, params=params, max_tokens=5)
        runs.clear()
        return run(core(executor, **settings), [request])["r"]

    plain = ask(None)
    assert not runs
    whole, chunked = ask(2), ask(2, max_prefill_chunk=7)
    assert len(runs) == 7, "once for each chunk of 7 of 50 tokens; the last token alone has nothing after it"
    assert plain[0] == whole[0] == chunked[0]
    assert [entry.token_id for entry in whole[2]] == [entry.token_id for entry in chunked[2]] == list(prompt[1:])
    for a, b in zip(whole[2], chunked[2], strict=True):
        assert a.top_ids == b.top_ids
        np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=1e-4)


def test_the_programs_are_the_steps_and_few_more(executor):
    shapes = executor.registry.shapes
    others = {"init", "slot", "mask", "prompt", "pick 2", "pick 8"}
    assert set(executor.registry.programs) == {*shapes.decode, *shapes.prefill, *others}


@pytest.mark.parametrize(
    ("mate", "picks"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "logprobs": 0}, False),
        ({"temperature": 0.0, "logprobs": 1}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.0, "presence_penalty": 0.5}, True),
        ({"temperature": 0.0, "min_tokens": 30}, True),
        ({"temperature": 0.0, "logit_bias": {5: 1.0}}, True),
        ({"temperature": 0.0, "allowed_token_ids": (5, 6)}, True),
    ],
)
def test_the_pick_programs_run_only_where_a_row_wants_more_and_change_no_mate(executor, monkeypatch, mate, picks):
    runs = []
    pick = executor.registry.pick
    monkeypatch.setattr(executor.registry, "pick", lambda rows: runs.append(rows) or pick(rows))

    def ask(name, prompt, **params):
        return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params), max_tokens=12, seed=3)

    greedy = ask("greedy", (9, 8, 7), temperature=0.0, logprobs=0)
    alone = run(core(executor), [greedy])["greedy"]
    assert not runs
    together = run(core(executor), [greedy, ask("mate", (4, 5), **mate)])
    assert bool(runs) == picks
    assert together["greedy"][0] == alone[0]
    for a, b in zip(together["greedy"][1], alone[1], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
