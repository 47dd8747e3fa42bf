"""A peer ready to be measured: its engine in a runner, or its server with a client here."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from jcb.bench.peers.catalogue import Peer
from jcb.bench.peers.child import PeerError, Runner, Server
from jcb.bench.serving.client import Outcome, make_body, send

Jobs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of jobs. counts: tokens that each request was answered with. ttfts, itls: seconds, the gaps of all
    requests together. sample: the first request's ids where they are known. rss: most bytes resident, 0 unknown.
    """

    seconds: float
    counts: list[int]
    ttfts: list[float]
    itls: list[float]
    sample: list[int] = field(default_factory=list)
    rss: int = 0


class Seat(Protocol):
    """start: loads, returns what is told of the peer. Every method but pause, resume, close may raise PeerError."""

    peer: Peer
    through: str  # "engine" or "http"

    def start(self, seconds: float) -> Mapping[str, Any]: ...

    def measure(self, jobs: Jobs, seconds: float) -> Measured: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class EngineSeat:
    """The engine itself."""

    through = "engine"

    def __init__(self, peer: Peer, logs: Path) -> None:
        self.peer = peer
        self._log = logs / f"{peer.name}.log"
        self._runner: Runner | None = None

    def start(self, seconds: float) -> Mapping[str, Any]:
        _check_installed(self.peer)
        self._runner = Runner(self.peer.command, self.peer.env, self._log)
        return self._runner.ask({"do": "load", "settings": dict(self.peer.settings)}, seconds)

    def measure(self, jobs: Jobs, seconds: float) -> Measured:
        assert self._runner is not None
        answer = self._runner.ask({"do": "run", "jobs": list(jobs)}, seconds)
        times, tokens = answer["times"], answer["tokens"]
        return Measured(
            seconds=answer["seconds"],
            counts=[len(ids) for ids in tokens],
            ttfts=[row[0] - job.get("at", 0.0) for row, job in zip(times, jobs, strict=True) if row],
            itls=[after - before for row in times for before, after in itertools.pairwise(row)],
            sample=tokens[0],
            rss=answer["rss"],
        )

    def pause(self) -> None:
        if self._runner is not None:
            self._runner.pause()

    def resume(self) -> None:
        if self._runner is not None:
            self._runner.resume()

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class ServerSeat:
    """The server, asked by streams from this process."""

    through = "http"

    def __init__(self, peer: Peer, logs: Path) -> None:
        self.peer = peer
        self._log = logs / f"{peer.name}-server.log"
        self._server: Server | None = None
        self._model = ""

    def start(self, seconds: float) -> Mapping[str, Any]:
        if not self.peer.server:
            raise PeerError(self.peer.no_server)
        _check_installed(self.peer)
        port = _free_port()
        arguments = [part.format(port=port) for part in self.peer.server]
        began = time.perf_counter()
        self._server = Server([str(self.peer.python), *arguments], self.peer.env, self._log, f"http://127.0.0.1:{port}")
        self._server.wait_until_ready(self.peer.ready, seconds)
        with urllib.request.urlopen(f"{self._server.url}/v1/models") as page:
            self._model = json.load(page)["data"][0]["id"]
        return {"load_seconds": time.perf_counter() - began}

    def measure(self, jobs: Jobs, seconds: float) -> Measured:
        began = time.perf_counter()
        outcomes = asyncio.run(self._send_all(jobs, seconds))
        took = time.perf_counter() - began
        if failed := [outcome.error for outcome in outcomes if outcome.error]:
            raise PeerError(f"{len(failed)} of {len(jobs)} requests failed: {failed[0]}")
        return Measured(
            seconds=took,
            counts=[outcome.output_tokens for outcome in outcomes],
            ttfts=[outcome.ttft for outcome in outcomes],
            itls=[gap for outcome in outcomes for gap in outcome.itls],
        )

    async def _send_all(self, jobs: Jobs, seconds: float) -> list[Outcome]:
        assert self._server is not None
        url, began = f"{self._server.url}/v1/completions", time.perf_counter()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=seconds)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def one(job: Mapping[str, Any]) -> Outcome:
                await asyncio.sleep(began + job.get("at", 0.0) - time.perf_counter())
                fields = {"prompt": job["prompt"], "temperature": 0, "ignore_eos": True}
                body = make_body("openai", self._model, "", job["output"], fields)
                return await send(session, url, body, len(job["prompt"]))

            return list(await asyncio.gather(*[one(job) for job in jobs]))

    def pause(self) -> None:
        if self._server is not None:
            self._server.pause()

    def resume(self) -> None:
        if self._server is not None:
            self._server.resume()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _check_installed(peer: Peer) -> None:
    if not peer.python.exists():
        raise PeerError("not installed: `make install-peers`")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
