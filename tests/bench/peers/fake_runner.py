"""A runner without an engine: one token a request and step; settings say how it fails."""

import os
import signal
import sys
import time

from jcb.bench.peers.runners.protocol import serve


class Fake:
    def __init__(self, settings):
        self._settings = settings
        self._left = {}

    @property
    def has_work(self):
        return bool(self._left)

    def add(self, index, prompt, output):
        if self._settings.get("illegal"):
            os.kill(os.getpid(), signal.SIGILL)
        self._left[index] = output - self._settings.get("drops", 0)

    def step(self):
        time.sleep(self._settings.get("pause", 0.0))
        if self._settings.get("raises"):
            raise RuntimeError("no such\nkernel")
        gained = [(index, [7]) for index in self._left]
        self._left = {index: left - 1 for index, left in self._left.items() if left > 1}
        return gained


def load(settings):
    print("engines print what they like")
    if settings.get("refuses"):
        raise ValueError("no weights here")
    if settings.get("exits"):
        print("out of luck", file=sys.stderr)
        sys.exit(3)
    return Fake(settings), {"versions": {"fake": "1.0"}, "precision": "none"}


if __name__ == "__main__":
    serve(load)
