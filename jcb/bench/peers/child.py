"""A peer's process: started in a group of its own, held while others are measured, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LAST_WORDS = 300
_SIGNALS = {signal.SIGILL: "the processor lacks an instruction it uses", signal.SIGKILL: "killed, perhaps for memory"}


class PeerError(Exception):
    """Why a peer cannot go on, in one line."""


class Child:
    """A process and its group. env: what is set beside this process's own environment. log: where its stderr goes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, pipes: bool) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as stderr:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else stderr,
                    stderr=stderr,
                    env=os.environ | dict(env),
                    process_group=0,
                )
            except OSError as error:
                raise PeerError(f"cannot start {command[0]}: {error.strerror}") from error

    def pause(self) -> None:
        """Take the whole group off the cores."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the group, kindly at first."""
        self.resume()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def death(self) -> str:
        """How the process ended and its last words."""
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"it closed its answers but goes on; {self.last_words()}"
        if status >= 0:
            return f"it ended with status {status}; {self.last_words()}"
        number = signal.Signals(-status)
        why = f" ({_SIGNALS[number]})" if number in _SIGNALS else ""
        return f"it was ended by {number.name}{why}; {self.last_words()}"

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"last words: {lines[-1][:_LAST_WORDS]}" if lines else "without a word"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Runner(Child):
    """A process that speaks `jcb.bench.peers.runners.protocol`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        super().__init__(command, env, log, pipes=True)
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question; PeerError when it is an error, does not come in time, or the process ends."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise PeerError(self.death()) from error
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise PeerError(f"no answer to {message['do']!r} within {seconds:.0f} s; {self.last_words()}") from None
        if not line:
            raise PeerError(self.death())
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(" ".join(answer["error"].split())[:_LAST_WORDS])
        return answer

    def close(self) -> None:
        super().close()
        self._reader.join(5)

    def _read(self) -> None:
        """Lines, and an empty one at the end."""
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                self._answers.put(line)
        self._answers.put(b"")


class Server(Child):
    """A process that serves OpenAI's API at `url`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, url: str) -> None:
        super().__init__(command, env, log, pipes=False)
        self.url = url

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Until GET `path` answers 200; PeerError when the process ends or time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise PeerError(self.death())
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self.url + path):
                return
            time.sleep(0.3)
        raise PeerError(f"its server was not ready within {seconds:.0f} s; {self.last_words()}")
