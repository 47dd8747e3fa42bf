"""`make bench-start`: what it asks of a server, and what it says of two starts."""

import contextlib
from types import SimpleNamespace

from jcb.bench import start

COLD = {"ready_seconds": 90.0, "programs": 23.0, "compile_seconds": 80.0, "load_seconds": 4.0}
WARM = COLD | {
    "ready_seconds": 9.0, "resident_bytes": 1.9e9, "weight_bytes": 5e8, "page_bytes": 1e9,
    "first_token_seconds": [0.06, *[0.05] * 99],
}  # fmt: skip


def test_both_starts_in_lines():
    first, second, memory, tokens = start.lines(COLD, WARM)
    assert first.startswith("first  ready after 90.0 s: 23 programs in 80.0 s")
    assert second.startswith("second ready after 9.0 s")
    assert "400 MB beside them" in memory
    assert "first token of the first request 60.0 ms" in tokens
    assert "1.20 x" in tokens


async def test_first_tokens_are_of_requests_one_after_another(server):
    times = await start.first_tokens(server.url, 4)
    assert len(times) == 4
    assert min(times) > 0
    assert server.async_engine.metrics.request_success.value == 4


def test_a_start_is_asked_for_all_that_the_lines_need(monkeypatch):
    asked = []

    @contextlib.contextmanager
    def running(arguments):
        asked.append(arguments)
        yield SimpleNamespace(url="url", resident_bytes=lambda: 123)

    async def first_tokens(url, requests):
        return [0.5] * requests

    monkeypatch.setattr(start, "running", running)
    monkeypatch.setattr(start, "metric", lambda url, name: 7.0)
    monkeypatch.setattr(start, "first_tokens", first_tokens)
    found = start.start(["--max-num-seqs", "2"], 3)
    assert asked == [["--max-num-seqs", "2"]]
    assert set(found) == set(WARM)
    assert (found["resident_bytes"], found["first_token_seconds"]) == (123, [0.5] * 3)


def test_an_output_file_without_a_name_is_refused(capsys):
    assert start.main(["--output"]) == 2
    assert "--output needs a file" in capsys.readouterr().err
