"""Reading back: every event as it was written, and words for what is no recording."""

import json

import pytest

from jcb.recording import Abort, Arrival, End, Header, Knobs, Recording, Row, Step, Truncated, reader
from jcb.recording.events import from_json, to_json
from jcb.types import RowKind

EVENTS = [
    Arrival(t=0.5, id=0, prompt_tokens=9, max_tokens=4, chain=(0, 1), arrived=0.25, is_open=True),
    Arrival(t=0.5, id=1, prompt_tokens=2, max_tokens=4, priority=-1, guided=True, token_ids=(5, 0)),
    Step(
        step=1, t=1.0, rows=(Row(0, 3, 0, 9, RowKind.NEW, True, (1, 2, 3)), Row(1, 0, 4, 1, RowKind.CONTINUED, False)),
        preempted=(7,), bucket=(16, 8, 32), host=1e-4, device=0.02, before=1e-5, dispatch=2e-5,
    ),
    Step(step=2, t=1.5, rows=(), failed=""),
    Step(step=3, t=1.6, rows=(Row(0, 3, 9, 1, RowKind.RESUMED, True),), failed="collect"),
    Abort(t=2.0, id=1, reason="stop"),
    End(t=2.0, id=1, reason="stop", output_tokens=3, first_token_t=1.25, chain=(4,)),
    End(t=2.5, id=0, reason="error", output_tokens=0, code="queue_timeout", token_ids=()),
    Knobs(t=2.75, changes={"policy": "priority"}),
    Truncated(t=3.0, reason="why"),
]  # fmt: skip
SCHEDULER = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "queue_timeout": None}
HEADER = Header(
    model="m", vocab_size=10, platform="cpu", started_at=1.0, shape={"num_layers": 1},
    config={
        "scheduler": SCHEDULER, "engine": {"overlap": False},
        "cache": {"page_size": 4, "num_pages": 64, "enable_prefix_caching": True},
    },
)  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event):
    back = from_json(json.loads(json.dumps(to_json(event))))
    if isinstance(event, End) and event.token_ids == ():
        event = End(t=2.5, id=0, reason="error", output_tokens=0, code="queue_timeout")
    assert back == event


def write(path, lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recording_knows_under_what_it_was_made(tmp_path):
    path = write(tmp_path / "r.jsonl", [HEADER.to_json(), *map(to_json, EVENTS)])
    recording = Recording.open(path)
    assert recording.header == HEADER
    assert len(list(recording)) == len(EVENTS)
    assert [step.step for step in recording.steps()] == [1, 3]
    config, limits = recording.scheduler_config(), recording.limits()
    assert (config.max_num_seqs, config.queue_timeout) == (4, float("inf"))
    assert (limits.page_size, limits.num_pages, limits.max_model_len, limits.vocab_size) == (4, 64, 128, 10)
    assert recording.enable_prefix_caching
    assert not recording.overlap
    step = next(recording.steps())
    assert (step.num_tokens, step.is_decode) == (10, False)


def test_a_last_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = write(tmp_path / "r.jsonl", [HEADER.to_json(), to_json(EVENTS[0]), '{"event": "arri'])
    assert list(Recording.open(path)) == EVENTS[:1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["hello\n"], "line 1: not JSON"),
        (["[1]\n"], "line 1: not JSON of a recording"),
        ([{"jcb_recording": 2}], "no header of a jcb recording of version 1"),
        ([{"jcb_recording": 1, "extra": 1}], "header has wrong fields"),
        ([HEADER.to_json(), {"event": "party"}], "line 2: no event of a recording .unknown event 'party'"),
        ([HEADER.to_json(), {"t": 1}], "line 2: no event"),
        ([HEADER.to_json(), {"event": "abort", "id": 1}], "line 2: no event"),
        ([HEADER.to_json(), {"event": "step", "step": 1, "t": 0, "rows": [[1]]}], "line 2: no event"),
    ],
)
def test_what_is_no_recording_is_told_with_the_line(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        list(Recording.open(write(tmp_path / "r.jsonl", lines)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"recording '.*gone.jsonl' cannot be read: No such file"):
        Recording.open(tmp_path / "gone.jsonl")


def in_words(number):
    return {"event": "arrival", "t": 0, "id": number, "prompt_tokens": 3, "max_tokens": 4, "chain": []}


END = {"event": "end", "t": 1, "id": 0, "reason": "stop", "output_tokens": 1, "chain": []}
STEP = {"event": "step", "step": 1, "t": 0, "preempted": []}


@pytest.mark.parametrize(
    "lines",
    [
        [in_words(0) | {"t": "soon"}],
        [in_words(0) | {"id": True}],
        [in_words(0) | {"id": 2**70}],
        [in_words(0) | {"prompt_tokens": -1}],
        [in_words(0) | {"prompt_tokens": 10**12}],
        [in_words(0) | {"prompt_tokens": 1 << 23}],
        [in_words(0) | {"chain": [None]}],
        [in_words(0) | {"party": 1}],
        [in_words(0), in_words(0)],
        [in_words(1), in_words(0)],
        [END],
        [in_words(0), END, END],
        [in_words(0), END | {"reason": "boredom"}],
        [in_words(0), END | {"output_tokens": 1 << 23}],
        [STEP | {"rows": {"a": 1}}],
        [STEP | {"rows": [7]}],
        [STEP | {"rows": [[0, 0, 0, 1, "new", 1, 5]]}],
        [STEP | {"rows": [[0, 0, -1, 1, "new", 1]]}],
        [STEP | {"rows": [[0, 0, 0, 1, ["new"], 1]]}],
        [STEP | {"rows": [], "device": -1.0}],
        [STEP | {"rows": [], "bucket": [1, 2]}],
        [{"event": ["step"]}],
        [{"event": "knobs", "t": 0, "changes": [1]}],
        ["[" * 200_000 + "\n"],
        ['{"event": "abort", "t": NaN, "id": 1}\n'],
        ['{"event": "abort", "t": 1e999, "id": 1}\n'],
        ['{"event": "abort", "t": ' + "1" * 6000 + ', "id": 1}\n'],
    ],
    ids=lambda lines: str(lines)[-60:],
)
def test_an_event_that_cannot_be_is_told_with_its_line(tmp_path, lines):
    recording = Recording.open(write(tmp_path / "r.jsonl", [HEADER.to_json(), *lines]))
    with pytest.raises(ValueError, match=f"line {len(lines) + 1}: no"):
        list(recording)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("cache", {"page_size": 0}),
        ("cache", {"page_size": 1 << 40}),
        ("cache", {"page_size": "4"}),
        ("cache", {"num_pages": 10**12}),
        ("cache", {"num_pages": 1}),
        ("cache", {"num_pages": None}),
        ("cache", {"enable_prefix_caching": 1}),
        ("scheduler", {"max_model_len": None}),
        ("scheduler", {"max_num_seqs": 1 << 40, "max_num_batched_tokens": 1 << 41}),
        ("scheduler", {"max_num_seqs": "4"}),
        ("scheduler", {"policy": "lifo"}),
        ("scheduler", {"token_buckets": 5}),
        ("scheduler", {"party": 5}),
        ("engine", {"overlap": None}),
    ],
    ids=str,
)
def test_a_header_that_no_engine_had_is_told(tmp_path, section, values):
    header = HEADER.to_json()
    header["config"][section] = header["config"][section] | values
    recording = Recording.open(write(tmp_path / "r.jsonl", [header]))
    with pytest.raises(ValueError, match=rf"r\.jsonl: the .*({'|'.join(values)}|setting|scheduler)"):
        (recording.limits(), recording.scheduler_config(), recording.enable_prefix_caching, recording.overlap)


@pytest.mark.parametrize("config", [None, 1, [], {}, {"cache": 1, "scheduler": [], "engine": {}}], ids=str)
def test_a_header_without_sections_is_told(tmp_path, config):
    path = write(tmp_path / "r.jsonl", [HEADER.to_json() | {"config": config}])
    with pytest.raises(ValueError, match=r"r\.jsonl: the header"):
        Recording.open(path).limits()


def test_a_line_without_an_end_costs_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "r.jsonl", [HEADER.to_json(), "x" * 5000])
    with pytest.raises(ValueError, match=r"line 2: not JSON of a recording .it is over 1,000 bytes"):
        list(Recording.open(path))


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_no_file_is_not_read(path):
    with pytest.raises(ValueError, match="is no file"):
        Recording.open(path)
