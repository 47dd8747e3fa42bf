"""What signals do to a serving process."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_serve import CLIENT, start  # noqa: F401 (a fixture)

LONG = {"model": "fake", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}


def serving(start, *args):  # noqa: F811
    """A server with one long stream running, and the client that reads it."""
    server = start(*args)
    server.go.touch()
    server.wait_for(r"jcb is ready: (\S+)")
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", json.dumps(LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while "jcb:num_requests_running 1" not in server.metrics() and time.monotonic() < deadline:
        time.sleep(0.02)
    return server, client


def test_b181_what_outlasts_the_drain_ends_with_an_event(start):  # noqa: F811
    server, client = serving(start, "--set", "server.drain_seconds=0.2")
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 3
    events = client.communicate(timeout=30)[0].decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_b181_a_second_signal_ends_it_now(start):  # noqa: F811
    server, client = serving(start)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(r"(stopping)")
    began = time.monotonic()
    assert server.stop(signal.SIGTERM) == 1
    assert time.monotonic() - began < 2
    client.communicate(timeout=30)


def children(pid):
    """Ids of the living processes whose parent is `pid`."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_b179_nothing_outlives_a_killed_server(start):  # noqa: F811
    """The process that tries grammars out is the only child there is."""
    server = start()
    server.go.touch()
    server.wait_for(r"jcb is ready: (\S+)")
    body = {"model": "fake", "prompt": "x", "max_tokens": 4, "guided_regex": "[a-z]{2}"}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", json.dumps(body)],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert b"choices" in done.stdout
    workers = children(server.process.pid)
    assert workers
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
