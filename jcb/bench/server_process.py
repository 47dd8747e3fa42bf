"""A jcb server as a child process, for benchmarks that go through HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Server:
    """One that is ready."""

    url: str
    process: subprocess.Popen[str]

    def resident_bytes(self) -> int:
        """Memory that the process has now (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(arguments: Sequence[str], *, timeout: float = 900.0) -> Generator[str]:
    """The URL of a server, see `running`."""
    with running(arguments, timeout=timeout) as server:
        yield server.url


@contextlib.contextmanager
def running(arguments: Sequence[str], *, timeout: float = 900.0) -> Generator[Server]:
    """Start `python -m jcb serve` with `arguments`, wait until it is ready, yield it, stop it.

    Raises RuntimeError with the server's last words when it does not become ready in `timeout` seconds.
    """
    url = f"http://127.0.0.1:{(port := _free_port())}"
    command = [sys.executable, "-m", "jcb", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        _wait_until_ready(process, url, time.monotonic() + timeout)
        yield Server(url, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _wait_until_ready(process: subprocess.Popen[str], url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            words = process.stderr.read()[-2000:] if process.stderr else ""
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready:\n{words}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/ready"):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} was not ready in time")


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples on the server's /metrics page."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        return metric_of(page.read().decode(), name)


def metric_of(page: str, name: str) -> float:
    """The same of a page at hand."""
    lines = page.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def model_id(url: str) -> str:
    """The name the server gives its model."""
    with urllib.request.urlopen(f"{url}/v1/models") as page:
        return json.load(page)["data"][0]["id"]
