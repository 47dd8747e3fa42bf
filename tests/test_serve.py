"""serve.py as a process: answers while it loads, says how to call it, drains on SIGTERM. The model is a fake one."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Stands in for jcb.engine.build; the load takes as long as the file named by the first argument is absent.
PROGRAM = """
import sys, time, types
from pathlib import Path
from tests.fake_model import fake_engine

def load_engine(config, *, progress):
    progress("load", 1_000_000, 2_000_000)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    progress("load", 2_000_000, 2_000_000)
    engine = fake_engine()
    engine.executor.step_seconds = 0.02
    engine.generation_defaults = {}
    schedule = engine.core.scheduler.schedule

    def schedule_or_die(now):
        if Path(sys.argv[1] + ".die").exists():
            raise AssertionError("can" + "ary prompt")
        return schedule(now)

    engine.core.scheduler.schedule = schedule_or_die
    return engine

sys.modules["jcb.engine.build"] = types.SimpleNamespace(load_engine=load_engine)
import serve
sys.exit(serve.serve_main(sys.argv[2:]))
"""

CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
"""


class Server:
    """A running serve.py and what it printed."""

    def __init__(self, folder, *args):
        self.go = folder / "go"
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(self.go), "--port", "0", *args], cwd=ROOT, stdout=log, stderr=log
            )
        self.url = self.wait_for(r"listens on (http://\S+)")

    def wait_for(self, pattern):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log.read_text()):
                return match[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in: {self.log.read_text()}")

    def status(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def metrics(self):
        """The metrics without their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return re.sub(r"\{[^}]*\}", "", response.read().decode())

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture
def start(tmp_path):
    servers = []

    def start(*args):
        servers.append(Server(tmp_path, *args))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


def run_printed_curl(server):
    """Sends what the printed curl command would, and returns the body."""
    command = shlex.split(server.log.read_text().partition("curl ")[2].replace("\\\n", " "))
    url = next(word for word in command if word.startswith("http"))
    headers = dict(command[i + 1].split(": ", 1) for i, word in enumerate(command) if word == "-H")
    data = command[command.index("-d") + 1].encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
        return response.read().decode()


def test_answers_while_loading_then_serves_then_drains(start):
    server = start()
    assert server.status("/live") == 200
    assert server.status("/ready") == 503
    assert server.status("/v1/models") == 503
    server.go.touch()
    assert server.wait_for(r"jcb is ready: (\S+)") == server.url
    assert server.status("/ready") == 200
    events = run_printed_curl(server).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert server.stop() == 0
    assert "loading weights: 1 of 2 MB" in server.log.read_text()


def test_a_signal_while_loading_ends_it_at_once(start):
    server = start()
    assert server.stop() == 0


def test_running_requests_finish_after_a_signal(start):
    server = start()
    server.go.touch()
    server.wait_for(r"jcb is ready: (\S+)")
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 60, "ignore_eos": True})
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{server.url}/v1/completions", body], stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while "jcb:num_requests_running 1" not in server.metrics() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.stop() == 0
    answer = json.loads(client.communicate(timeout=30)[0])
    assert answer["usage"]["completion_tokens"] == 60


def test_a_broken_engine_answers_then_says_where_it_stood_and_ends_with_status_1(start):
    server = start()
    server.go.touch()
    server.wait_for(r"jcb is ready: (\S+)")
    Path(f"{server.go}.die").touch()
    body = json.dumps({"model": "fake", "prompt": "canary prompt", "max_tokens": 60})
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value:
        assert (caught.value.code, json.load(caught.value)["error"]["code"]) == (503, "engine_lost")
    assert server.process.wait(timeout=30) == 1
    log = server.log.read_text()
    assert "the engine is dead; ending" in log
    assert "(most recent call first)" in log
    assert "canary" not in log


def test_a_taken_port_is_one_line_and_status_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [sys.executable, "serve.py", "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken; choose another" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_open_address_without_a_key_is_refused():
    result = subprocess.run(
        [sys.executable, "serve.py", "--host", "0.0.0.0"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "--api-key-file" in result.stderr
