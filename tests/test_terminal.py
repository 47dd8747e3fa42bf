"""Progress while loading, and text streamed without a server."""

import random
from types import SimpleNamespace

import pytest

from jcb import terminal
from jcb.types import RequestError


def test_plain_progress_says_begin_end_and_little_between(capsys):
    now = 0.0
    show = terminal._PlainProgress(clock=lambda: now)
    for done in range(0, 101, 10):
        show("load", done * 1_000_000, 100_000_000)
        now += 1.0
    show("compile", 1, 2)
    assert capsys.readouterr().err.splitlines() == [
        "loading weights: 0 of 100 MB (0.0 s)",
        "loading weights: 50 of 100 MB (5.0 s)",
        "loading weights: 100 of 100 MB (10.0 s)",
        "compiling: 1 of 2 (0.0 s)",
    ]


def test_without_a_terminal_progress_is_plain(capsys):
    with terminal.load_progress() as show:
        show("compile", 3, 3)
    assert capsys.readouterr().err == "compiling: 3 of 3 (0.0 s)\n"


def test_on_a_terminal_progress_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with terminal.load_progress() as show:
        show("load", 5_000_000, 10_000_000)
        show("load", 10_000_000, 10_000_000)
    assert "10 of 10 MB" in capsys.readouterr().err


def conversation(monkeypatch, lines, answers):
    """Runs the chat on `lines`; `answers` are texts or errors. Returns the messages of each request."""
    asked = []

    def encode_chat(tokenizer, template, messages):
        asked.append([message["content"] for message in messages])
        return [1]

    def stream(engine, prompt, params):
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        yield from answer

    lines = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    monkeypatch.setattr("jcb.text.chat.encode_chat", encode_chat)
    monkeypatch.setattr(terminal, "stream", stream)
    engine = SimpleNamespace(chat_template=object(), tokenizer=None, info=SimpleNamespace(name="m"))
    monkeypatch.setattr("jcb.engine.build.load_engine", lambda config, progress: engine)
    assert terminal.chat(None, None, system="s") == 0
    return asked


def test_chat_remembers_until_told_to_start_over(monkeypatch, capsys):
    asked = conversation(monkeypatch, ["a", "b", "/new", "c"], ["A1", "B1", "C1"])
    assert asked == [["s", "a"], ["s", "a", "A1", "b"], ["s", "c"]]
    assert "A1" in capsys.readouterr().out


def test_chat_goes_on_after_a_refused_request(monkeypatch, capsys):
    asked = conversation(monkeypatch, ["a", "b"], [RequestError("too long"), "B1"])
    assert asked == [["s", "a"], ["s", "b"]]
    assert "too long" in capsys.readouterr().out


def test_stream_ends_its_request_when_the_reader_leaves(monkeypatch):
    class Core:
        has_work = True

        def __init__(self):
            self.added, self.aborted = [], []

        def add(self, request):
            self.added.append(request.request_id)

        def step(self):
            return []

        def abort(self, request_id, reason):
            self.aborted.append(request_id)

    class Processor:
        def __init__(self, tokenizer):
            pass

        def add(self, request):
            pass

        def process(self, outputs):
            return [SimpleNamespace(error=None, text="x")], []

    request = SimpleNamespace(request_id="r")
    monkeypatch.setattr("jcb.engine.admission.make_requests", lambda *args, **kwargs: [request])
    monkeypatch.setattr("jcb.engine.output.OutputProcessor", Processor)
    config = SimpleNamespace(engine=SimpleNamespace(seed=None))
    engine = SimpleNamespace(core=Core(), info=None, tokenizer=None, config=config)
    texts = terminal.stream(engine, [1], None)
    assert [next(texts), next(texts)] == ["x", "x"]
    texts.close()
    assert engine.core.added == engine.core.aborted == ["r"]


def test_requests_without_a_seed_draw_different_ones(monkeypatch):
    seeds = []

    def make_requests(prompt, params, *, rng, **_):
        seeds.append(rng.getrandbits(64))
        raise RequestError("enough")

    monkeypatch.setattr("jcb.engine.admission.make_requests", make_requests)
    config = SimpleNamespace(engine=SimpleNamespace(seed=None))
    engine = SimpleNamespace(info=None, config=config)
    for _ in range(2):
        with pytest.raises(RequestError):
            next(terminal.stream(engine, [1], None))
    assert seeds[0] != seeds[1]
    assert random.Random(None).getrandbits(64)
