"""A run as a file: the engine's order, every request's end, nothing that was said, and never in the engine's way."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jcb.recording import Abort, Arrival, End, Header, Knobs, Recorder, Recording, RecordingFile, Step, Truncated
from jcb.recording import recorder as recorder_module
from jcb.types import FinishReason
from tests.fakes import Bench

ROOT = Path(__file__).parents[2]
CANARY = 86_753_093  # as a token id; no other number of a recording is near it


def header(bench, **changes):
    config = {
        "scheduler": {"max_num_seqs": bench.config.max_num_seqs},
        "cache": {"page_size": bench.limits.page_size, "num_pages": bench.limits.num_pages},
    }
    values = {"model": "fake", "vocab_size": bench.limits.vocab_size, "platform": "cpu", "started_at": 0.0}
    return Header(config=config, **(values | changes))


def record(bench, path, **options):
    """Attach a recorder to `bench`."""

    def choose(plan):
        return max(plan.num_tokens, 2), max(len(plan.rows), 2), 32

    bench.core.recorder = Recorder(
        RecordingFile(path), header(bench), choose=choose, started=options.pop("started", 0.0), **options
    )
    return bench.core.recorder


def recorded(tmp_path, bench_options=None, **options):
    """A bench whose run is recorded."""
    bench = Bench(**bench_options or {})
    record(bench, tmp_path / "run.jsonl", **options)
    return bench


def events_of(tmp_path, bench):
    """Run to the end and read what was recorded."""
    bench.run()
    bench.core.recorder.close()
    return list(Recording.open(tmp_path / "run.jsonl"))


@pytest.mark.parametrize("overlap", [False, True])
def test_lines_are_in_the_order_of_the_engine(tmp_path, overlap):
    bench = Bench(overlap=overlap)
    recorder = record(bench, tmp_path / "run.jsonl")
    bench.executor.keep_plans = True
    bench.now = 1.0
    bench.add("a", range(10), max_tokens=3)
    bench.step()
    bench.now = 2.0
    bench.add("b", range(4), max_tokens=2, priority=0)
    bench.step()
    bench.now = 3.0
    bench.abort("b")
    bench.run()
    recorder.close()
    events = list(Recording.open(tmp_path / "run.jsonl"))
    words = "".join(type(event).__name__[0] if not isinstance(event, Arrival) else "+" for event in events)
    assert words.startswith("+S+SAE")
    assert words.count("E") == 2
    steps = [event for event in events if isinstance(event, Step) and event.rows]
    for step, plan in zip(steps, bench.executor.plans, strict=True):
        assert step.step == plan.step_id
        expected = [(row.slot, row.start, row.q_len, row.kind, row.samples) for row in plan.rows]
        assert [(row.slot, row.start, row.q_len, row.kind, row.samples) for row in step.rows] == expected
    assert [step.t for step in steps][:2] == [1.0, 2.0]


def test_pages_of_a_row_are_those_that_are_new_to_it(tmp_path):
    bench = recorded(tmp_path, {"page_size": 4})
    bench.executor.keep_plans = True
    bench.add("a", range(6), max_tokens=8)
    steps = [event for event in events_of(tmp_path, bench) if isinstance(event, Step) and event.rows]
    table = []
    for step, plan in zip(steps, bench.executor.plans, strict=True):
        table += step.rows[0].pages
        assert tuple(table) == plan.rows[0].page_table


def test_equal_prefixes_have_equal_numbers_and_namespaces_differ(tmp_path):
    bench = recorded(tmp_path, {"page_size": 4, "num_pages": 128})
    bench.add("a", [*range(8), 50], max_tokens=4)
    bench.add("b", [*range(8), 60], max_tokens=4)
    bench.add("c", [*range(4), *range(40, 44)], max_tokens=1, namespace="other")
    bench.add("d", [*range(4), *range(40, 44)], max_tokens=1)
    events = events_of(tmp_path, bench)
    chains = {event.id: event.chain for event in events if isinstance(event, Arrival)}
    assert chains == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (0, 4)}
    ends = {event.id: event for event in events if isinstance(event, End)}
    assert ends[0].chain[:2] == (0, 1)
    assert len(ends[0].chain) == (9 + 4) // 4
    assert ends[0].chain[2] != ends[1].chain[2]
    assert ends[0].reason == "length"
    assert ends[0].output_tokens == 4


def test_no_token_id_is_written_unless_asked_for(tmp_path):
    for asked in (False, True):
        bench = recorded(tmp_path, {"vocab_size": CANARY + 1}, token_ids=asked)
        bench.add("secret-name", [CANARY] * 9, max_tokens=3, namespace="secret-tenant")
        events = events_of(tmp_path, bench)
        text = (tmp_path / "run.jsonl").read_text()
        assert str(CANARY) not in text.replace(f'"vocab_size":{CANARY + 1}', "") or asked
        assert "secret" not in text
        for token in bench.tokens["secret-name"]:
            assert (str(token) in text) == asked
        arrival = next(event for event in events if isinstance(event, Arrival))
        assert arrival.token_ids == ((CANARY,) * 9 if asked else None)


def test_times_are_kept_and_the_device_time_is_the_steps_own(tmp_path):
    bench = recorded(tmp_path, {"overlap": True}, started=90.0)
    collect = bench.executor.collect

    def slow(handle):
        bench.now += 0.5
        return collect(handle)

    bench.executor.collect = slow
    bench.now = 100.0
    bench.add("a", range(3), max_tokens=3, arrival_time=99.0)
    events = events_of(tmp_path, bench)
    arrival = next(event for event in events if isinstance(event, Arrival))
    assert (arrival.t, arrival.arrived) == (10.0, 9.0)
    assert [event.device for event in events if isinstance(event, Step) and event.rows] == [0.5] * 3
    end = next(event for event in events if isinstance(event, End))
    assert (end.first_token_t, end.t) == (10.5, 11.5)


@pytest.mark.parametrize("where", ["fails_dispatch", "fails_collect"])
def test_a_failed_step_is_told(tmp_path, where):
    bench = recorded(tmp_path, {"overlap": True})
    setattr(bench.executor, where, lambda plan: plan.step_id == 3)
    bench.add("a", range(3), max_tokens=6)
    steps = {event.step: event.failed for event in events_of(tmp_path, bench) if isinstance(event, Step) and event.rows}
    assert steps[3] == where.removeprefix("fails_")
    assert steps[2 if where == "fails_dispatch" else 4] == "void"
    assert steps[1] == steps[max(steps)] == ""


def test_knobs_and_stops_from_outside_are_events(tmp_path):
    bench = Bench()
    recorder = record(bench, tmp_path / "run.jsonl")
    bench.add("a", range(5), max_tokens=9)
    bench.step()
    bench.core.turn({"max_num_batched_tokens": 8})
    bench.core.abort("a", FinishReason.STOP)
    bench.run()
    recorder.close()
    events = list(Recording.open(tmp_path / "run.jsonl"))
    assert Knobs(t=0.0, changes={"max_num_batched_tokens": 8}) in events
    assert Abort(t=0.0, id=0, reason="stop") in events
    assert events[-2 if isinstance(events[-1], Step) else -1].reason == "stop"


# ---- the file


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"record='.*none/run.jsonl' cannot be written: No such file"):
        RecordingFile(tmp_path / "none" / "run.jsonl")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is no recording"):
        RecordingFile(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"cannot be written: Is a directory|exists and is no recording"):
        RecordingFile(tmp_path)


def test_an_old_recording_is_replaced_and_only_the_owner_may_read(tmp_path):
    for _ in range(2):
        bench = recorded(tmp_path)
        bench.add("a", range(3), max_tokens=2)
        events = events_of(tmp_path, bench)
        assert sum(isinstance(event, Arrival) for event in events) == 1
    assert stat.S_IMODE(os.stat(tmp_path / "run.jsonl").st_mode) == 0o600


def test_a_writer_that_stands_still_ends_the_recording_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_PENDING", 5)
    monkeypatch.setattr(recorder_module, "WRITE_INTERVAL", 60.0)
    bench = recorded(tmp_path)
    bench.add("a", range(3), max_tokens=20)
    events = events_of(tmp_path, bench)
    bench.check()
    assert isinstance(events[-1], Truncated)
    assert len(events) == 6


def test_a_file_that_grew_too_large_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_BYTES", 1_000)
    bench = recorded(tmp_path)
    bench.add("a", range(3), max_tokens=30)
    assert isinstance(events_of(tmp_path, bench)[-1], Truncated)
    assert (tmp_path / "run.jsonl").stat().st_size < 1_500
    assert not bench.core.recorder._device


def test_a_disk_that_fails_costs_nobody_an_answer(tmp_path, caplog):
    bench = Bench()
    recorder = record(bench, tmp_path / "run.jsonl")

    def full(text):
        raise OSError(28, "No space left on device")

    recorder._file.write = full
    bench.add("a", range(3), max_tokens=5)
    bench.run()
    recorder.close()
    bench.check()
    assert "the recording ends early: No space left on device" in caplog.text


def test_what_a_link_points_at_is_left_alone_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="exists and is no recording"):
        RecordingFile(tmp_path / "link")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a socket: name a file"):
        RecordingFile(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"record='~nobody-7q/x' cannot be written"):
        RecordingFile("~nobody-7q/x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_disk_that_is_full_costs_nobody_an_answer(caplog):
    bench = Bench()
    recorder = record(bench, "/dev/full")
    bench.add("a", range(3), max_tokens=5)
    bench.run()
    recorder.close()
    bench.check()
    assert "the recording ends early: No space left on device" in caplog.text


def test_a_process_that_is_killed_leaves_what_came_before(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import sys; from tests.fakes import Bench; from tests.recording.test_recorder import record;"
        "bench = Bench(); record(bench, sys.argv[1]);"
        "[(bench.add(str(number), range(30), max_tokens=20), bench.run()) for number in range(100_000)]"
    )
    child = subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 20_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    assert child.wait(30) == -signal.SIGKILL
    assert sum(isinstance(event, Step) for event in Recording.open(path)) > 20


def test_a_process_that_just_ends_leaves_a_whole_recording(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.fakes import Bench;"
        "from tests.recording.test_recorder import record;"
        "bench = Bench(); record(bench, Path(sys.argv[1])); bench.add('a', range(9), max_tokens=7); bench.run()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "run.jsonl"], cwd=ROOT, check=True, timeout=60)
    events = list(Recording.open(tmp_path / "run.jsonl"))
    assert any(isinstance(event, End) and event.output_tokens == 7 for event in events)


def test_distinct_pages_are_numbered_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_KNOWN", 3)
    numbers = recorder_module._Numbers()
    assert [numbers.of(word) for word in "abcab"] == [0, 1, 2, 0, 1]
    assert [numbers.of(word) for word in "da"] == [3, 4]
    assert len(numbers._numbers) == 3


def test_a_turn_costs_the_engine_microseconds(tmp_path):
    """The step's own thread only appends; lines are made elsewhere."""
    bench = Bench(max_num_seqs=4)
    bench.add("a", range(3), max_tokens=2)
    bench.step()
    recorder = record(bench, tmp_path / "run.jsonl")
    names = set()
    write = recorder._file.write
    recorder._file.write = lambda text: (names.add(threading.current_thread().name), write(text))[1]
    plan = bench.scheduler.schedule(0.0)
    times = {"t": 0.0, "end": 0.0, "host": 0.0, "before": 0.0, "dispatch": 0.0}
    best = min(_seconds(lambda: recorder.turned(plan, [], **times)) for _ in range(5))
    recorder.close()
    assert best < 20e-6
    assert names <= {"jcb-recorder"}


def _seconds(call, count=200):
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def test_every_line_is_strict_json(tmp_path):
    bench = Bench(queue_timeout=float("inf"))
    bench.add("a", range(3), max_tokens=2)
    recorder = record(bench, tmp_path / "run.jsonl")
    bench.run()
    recorder.close()
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
