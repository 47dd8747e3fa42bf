"""A recorded run comes again, plan for plan: prefixes, preemptions, aborts, stops, failures, grammars, knobs."""

import contextlib
import json
import random

import pytest

from jcb.recording import Arrival, End, Header, Recorder, Recording, RecordingFile, Step
from jcb.simulate.recorded import page_tokens
from jcb.simulate.replay import Replay
from jcb.types import FinishReason, RequestError
from tests.fakes import Bench, CountingGrammar


def record(bench, path):
    """Attach a recorder with all that a replay needs."""
    config = {
        "scheduler": {name: getattr(bench.config, name) for name in bench.config.__dataclass_fields__},
        "cache": {
            "page_size": bench.limits.page_size, "num_pages": bench.limits.num_pages,
            "enable_prefix_caching": True,
        },
        "engine": {"overlap": bench.core._overlap},
    }  # fmt: skip
    config["scheduler"]["max_model_len"] = bench.limits.max_model_len
    header = Header(model="fake", vocab_size=bench.limits.vocab_size, platform="cpu", started_at=0.0, config=config)
    bench.core.recorder = Recorder(RecordingFile(path), header, choose=lambda plan: (8, 8, 8), started=0.0)


def ask(bench, rng, name, prefixes, grammars):
    prompt = rng.choice(prefixes)[: rng.randrange(13)] + [rng.randrange(100) for _ in range(rng.randrange(1, 30))]
    bench.add(
        name,
        prompt,
        max_tokens=rng.randrange(1, 25),
        priority=rng.randrange(2) if bench.config.policy == "priority" else 0,
        eos_token_ids=tuple(range(rng.choice((0, 8)))),
        min_tokens=rng.choice((0, 3)),
        namespace=rng.choice("ab"),
        arrival_time=bench.now - 0.005,
        grammar=CountingGrammar(bench.limits.vocab_size) if grammars and rng.random() < 0.4 else None,
    )


def drive(bench, seed, *, requests=30, grammars=False, fails=False, knobs=False):
    """Random arrivals, clients that leave, stop strings, time that passes."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100) for _ in range(12)] for _ in range(3)]
    if fails:
        bench.executor.fails_collect = lambda plan: plan.step_id % 37 == 11
        bench.executor.fails_dispatch = lambda plan: plan.step_id % 41 == 5
    left = requests
    while left or bench.core.has_work:
        bench.now += rng.choice((0.0, 0.3 * rng.random()))
        if left and rng.random() < 0.4:
            with contextlib.suppress(RequestError):
                ask(bench, rng, str(100 + left), prefixes, grammars)
            left -= 1
        if bench.requests and rng.random() < 0.05:
            name = rng.choice(list(bench.requests))
            bench.core.abort(name, rng.choice((FinishReason.ABORT, FinishReason.STOP)))
        if knobs and rng.random() < 0.1:
            bench.core.turn({"max_num_seqs": rng.randrange(1, 5), "max_num_batched_tokens": rng.randrange(5, 17)})
        if bench.core.has_work:
            bench.core.step()
    bench.core.recorder.close()


CASES = {
    "plain": ({}, {}),
    "without overlap": ({"overlap": False}, {}),
    "few pages": ({"num_pages": 17, "max_model_len": 60}, {}),
    "forced preemption": ({"preempt_every": 5}, {}),
    "chunks": ({"max_prefill_chunk": 3}, {}),
    "priority": ({"policy": "priority", "num_pages": 17, "max_model_len": 60}, {}),
    "reserve": ({"admission": "reserve"}, {}),
    "static": ({"admission": "static"}, {}),
    "timeouts": ({"queue_timeout": 0.9, "run_timeout": 1.5, "num_pages": 17, "max_model_len": 60}, {}),
    "grammars": ({}, {"grammars": True}),
    "failures": ({}, {"fails": True}),
    "knobs": ({}, {"knobs": True}),
    "all of it": (
        {"num_pages": 19, "max_model_len": 60, "preempt_every": 9, "run_timeout": 3.0, "policy": "priority"},
        {"grammars": True, "fails": True, "knobs": True},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "_"))
def test_every_plan_comes_again_as_it_was(tmp_path, case, seed):
    options, run = CASES[case]
    bench = Bench(**options)
    record(bench, tmp_path / "run.jsonl")
    drive(bench, seed, **run)
    recording = Recording.open(tmp_path / "run.jsonl")
    replayed = Replay(recording).run()
    assert replayed.difference is None
    events = list(recording)
    assert replayed.steps == sum(isinstance(event, Step) for event in events) > 20
    assert replayed.ends == sum(isinstance(event, End) for event in events)
    for step, rows in Replay(recording).turns():
        assert rows == step.rows


def test_what_the_cases_cover(tmp_path):
    """The runs above hold what they are there for."""
    seen = set()
    for number, (options, run) in enumerate(CASES.values()):
        bench = Bench(**options)
        record(bench, tmp_path / f"{number}.jsonl")
        drive(bench, 0, **run)
        for event in Recording.open(tmp_path / f"{number}.jsonl"):
            if isinstance(event, Step):
                seen |= {row.kind.value for row in event.rows}
                seen |= {"preempted" for _ in event.preempted}
                seen |= {"cached" for row in event.rows if row.kind.value == "new" and row.start}
                seen.add(event.failed)
            elif isinstance(event, End):
                seen |= {event.reason, event.code}
    assert seen >= {
        "new", "continued", "resumed", "preempted", "cached", "stop", "length", "abort", "queue_timeout", "run_timeout",
        "dispatch", "collect", "void",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda line: line.update(prompt_tokens=line["prompt_tokens"] + 1), "plan"),
        (lambda line: line.update(chain=[]), "plan"),
        (lambda line: line.update(max_tokens=1), None),
        (lambda line: line.update(prompt_tokens=500), "admission"),
    ],
)
def test_a_recording_that_is_not_of_this_run_is_noticed(tmp_path, change, what):
    bench = Bench()
    record(bench, tmp_path / "run.jsonl")
    bench.add("a", range(10), max_tokens=5)
    bench.run()
    bench.add("b", range(10), max_tokens=5)
    bench.run()
    bench.core.recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    last = max(index for index, line in enumerate(lines) if line.get("event") == "arrival")
    change(lines[last])
    if "chain" in lines[last] and lines[last]["chain"] == []:
        lines[-1 if lines[-1]["event"] == "end" else -2]["chain"] = []
    (tmp_path / "changed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = Replay(Recording.open(tmp_path / "changed.jsonl")).run().difference
    assert difference is not None
    assert what is None or difference.what == what


def test_pages_that_differ_have_ids_that_differ():
    pages = [tuple(page_tokens(number, 4, 11)) for number in range(3000)]
    assert len(set(pages)) == 3000
    assert all(0 <= token < 10 for page in pages for token in page), "the last id is kept for stops"


def test_arrivals_keep_their_order(tmp_path):
    bench = Bench()
    record(bench, tmp_path / "run.jsonl")
    drive(bench, 1)
    ids = [event.id for event in Recording.open(tmp_path / "run.jsonl") if isinstance(event, Arrival)]
    assert ids == sorted(ids)
