"""Many streams at once, and ten times too many: what is lost, what is wrong, how quick a refusal is.

    python -m jcb.bench.load [--streams 256] [--seconds 300] [--overload-seconds 60] [--output FILE.json]

First `--streams` streams for `--seconds`; one in twenty of the finished requests is then asked again alone and must
give the same tokens (an unlike one counts as wrong unless two candidates were as good as tied where they part).
Then requests arrive ten times as fast as the server can answer; what it answers must not fall behind what it answers
when just full, and those it cannot take must hear so at once. Exit status 1 when any of that does not hold.

Client and server share this machine's cores, and a client's work would in reality be another machine's: both phases
of the second part ask through `jcb.bench.plain_http`, whose requests cost a small part of what aiohttp's do, and the
client runs on uvloop. They last equally long and draw the same bodies; tokens are those that the server generates
in the last three quarters of a phase, by its own counter: each belongs to an answer, since none may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from jcb.bench.plain_http import PlainClient
from jcb.bench.server_process import metric, metric_of, model_id, serving

REPLAYED = 0.05
TIE_NATS = 1e-3
"""Two candidates closer than this may change places with the rounding of another step shape."""

OVERLOAD = 10
LEAST_GOODPUT = 0.9
MOST_REFUSAL_SECONDS = 0.05


@dataclass
class Sample:
    """A finished stream: what was asked and which tokens came."""

    body: dict[str, Any]
    token_ids: list[int]


@dataclass
class StreamsResult:
    """Streams side by side for a while."""

    streams: int
    seconds: float
    finished: int = 0
    tokens: int = 0
    lost: list[str] = field(default_factory=list)  # why
    replayed: int = 0
    tied: int = 0
    wrong: int = 0


@dataclass
class OverloadResult:
    """Answers and refusals when requests come `OVERLOAD` times too fast. Rates in tokens a second."""

    peak_rate: float
    goodput: float
    answered: int
    refused: int
    failed: int
    refusal_p50: float
    refusal_p99: float

    @property
    def is_good(self) -> bool:
        quick = self.refusal_p99 < MOST_REFUSAL_SECONDS
        return self.goodput >= LEAST_GOODPUT * self.peak_rate and quick and not self.failed


class Caller:
    """Sends requests to one server."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, seed: int = 0) -> None:
        self.server = url
        self._url = f"{url}{PATH}"
        self._model = model
        self._session = session
        self._seed = seed
        self._rng = random.Random(seed)

    def body(self, longest: int = 64) -> dict[str, Any]:
        """A request drawn at random: greedy or sampled with a seed of its own, 4 to `longest` tokens."""
        rng = self._rng
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 40)))
        fields = {"model": self._model, "prompt": prompt, "max_tokens": rng.randint(4, longest), "ignore_eos": True}
        return fields | {"temperature": rng.choice((0.0, 1.0)), "seed": rng.getrandbits(31), "return_token_ids": True}

    def again(self) -> Caller:
        """One that draws the same bodies from the first on."""
        return Caller(self.server, self._model, self._session, self._seed)

    async def stream(self, body: dict[str, Any]) -> list[int]:
        """Token ids of a streamed answer; RuntimeError with the reason unless it is whole."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(self._url, json=asked) as response:
            text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        events = [part.removeprefix("data: ") for part in text.split("\n\n")]
        if events[-2:] != ["[DONE]", ""]:
            raise RuntimeError("the stream broke off")
        parsed = [json.loads(event) for event in events[:-2]]
        if "error" in parsed[-1]:
            raise RuntimeError(f"error {parsed[-1]['error']['code']}")
        ids = [token for event in parsed[:-1] for token in event["choices"][0]["token_ids"]]
        if len(ids) != body["max_tokens"] or parsed[-1]["usage"]["completion_tokens"] != len(ids):
            raise RuntimeError(f"{len(ids)} of {body['max_tokens']} tokens")
        return ids

    async def whole(self, body: dict[str, Any]) -> tuple[int, float, Any]:
        """Status, seconds and body of an answer that is not streamed."""
        began = time.perf_counter()
        async with self._session.post(self._url, json=body) as response:
            answer = await response.json()
            return response.status, time.perf_counter() - began, answer


async def run_streams(caller: Caller, streams: int, seconds: float) -> StreamsResult:
    """`streams` loops of one request after another until `seconds` have passed, then the replays."""
    result = StreamsResult(streams, seconds)
    samples: list[Sample] = []
    end = time.monotonic() + seconds

    async def loop() -> None:
        while time.monotonic() < end:
            body = caller.body()
            try:
                samples.append(Sample(body, await caller.stream(body)))
            except (RuntimeError, aiohttp.ClientError) as error:
                result.lost.append(str(error) or type(error).__name__)

    await asyncio.gather(*[loop() for _ in range(streams)])
    result.finished, result.tokens = len(samples), sum(len(sample.token_ids) for sample in samples)
    for sample in random.Random(1).sample(samples, max(1, round(REPLAYED * len(samples)))) if samples else []:
        result.replayed += 1
        verdict = await _replay(caller, sample)
        result.tied += verdict == "tied"
        result.wrong += verdict == "wrong"
    return result


async def _replay(caller: Caller, sample: Sample) -> str:
    """Whether the request gives the "same" tokens alone, "tied" ones, or "wrong" ones."""
    _, _, answer = await caller.whole(sample.body | {"logprobs": 2})
    choice = answer["choices"][0]
    if choice["token_ids"] == sample.token_ids:
        return "same"
    first = next(i for i, (a, b) in enumerate(zip(choice["token_ids"], sample.token_ids, strict=True)) if a != b)
    best, second = sorted(choice["logprobs"]["top_logprobs"][first].values(), reverse=True)[:2]
    return "tied" if sample.body["temperature"] == 0 and best - second < TIE_NATS else "wrong"


async def run_overload(caller: Caller, slots: int, seconds: float) -> OverloadResult:
    """The rate of a server that is just full, then `OVERLOAD` times as many requests as it can answer."""
    async with PlainClient(caller.server) as client:
        full = Phase(client, caller, seconds)
        await asyncio.gather(full.rate(), *[full.loop() for _ in range(2 * slots)])
        if not full.answers_a_second():
            raise RuntimeError(f"nothing was answered in {seconds:g} s: ask for longer with --overload-seconds")
        crowd = Phase(client, caller, seconds)
        tasks = await crowd.arrivals(OVERLOAD * full.answers_a_second())
    refusals = sorted(crowd.refusals)
    return OverloadResult(
        peak_rate=full.tokens_a_second,
        goodput=crowd.tokens_a_second,
        answered=len(crowd.answers),
        refused=len(refusals),
        failed=tasks - len(crowd.answers) - len(refusals),
        refusal_p50=_quantile(refusals, 0.5),
        refusal_p99=_quantile(refusals, 0.99),
    )


class Phase:
    """Requests for `seconds` from now, the same ones in every phase: when they were answered, or how soon refused."""

    def __init__(self, client: PlainClient, caller: Caller, seconds: float) -> None:
        self.answers: list[float] = []
        self.refusals: list[float] = []
        self.tokens_a_second = 0.0
        self._client, self._caller, self._seconds = client, caller.again(), seconds
        self._began = time.monotonic()

    async def loop(self) -> None:
        """One request after another."""
        while time.monotonic() < self._began + self._seconds:
            await self.one()

    async def arrivals(self, rate: float) -> int:
        """`rate` requests a second, however many are answered; how many there were, once all have ended."""
        counting, tasks = asyncio.create_task(self.rate()), []
        while (now := time.monotonic()) < self._began + self._seconds:
            while len(tasks) < rate * (now - self._began):
                tasks.append(asyncio.create_task(self.one()))
            await asyncio.sleep(max(0.001, self._began + len(tasks) / rate - now))
        await asyncio.gather(counting, *tasks)
        return len(tasks)

    async def one(self) -> None:
        """Asks one and notes what became of it."""
        body, began = json.dumps(self._caller.body(32)).encode(), time.perf_counter()
        status, _ = await self._client.post(PATH, body)
        if status == 200:
            self.answers.append(time.monotonic())
        elif status == 429:
            self.refusals.append(time.perf_counter() - began)

    async def rate(self) -> None:
        """Tokens that the server generates a second, between the first quarter of the time and its end."""
        await asyncio.sleep(self._seconds / 4)
        before, began = await self._tokens(), time.monotonic()
        await asyncio.sleep(self._began + self._seconds - began)
        self.tokens_a_second = (await self._tokens() - before) / (time.monotonic() - began)

    def answers_a_second(self) -> float:
        """Between the first quarter of the time and its end."""
        first, end = self._began + self._seconds / 4, self._began + self._seconds
        return sum(first <= when <= end for when in self.answers) / (end - first)

    async def _tokens(self) -> float:
        _, page = await self._client.get("/metrics")
        return metric_of(page.decode(), "jcb:generation_tokens_total")


def _quantile(ascending: list[float], part: float) -> float:
    return ascending[min(int(part * len(ascending)), len(ascending) - 1)] if ascending else 0.0


async def run(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both parts; the figures, and what was left over afterwards."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        caller = Caller(url, model_id(url), session)
        streams = await run_streams(caller, options.streams, options.seconds)
        print(f"streams: {streams}", flush=True)
        overload = await run_overload(caller, options.slots, options.overload_seconds)
        print(f"overload: {overload}", flush=True)
    left = {name: metric(url, f"jcb:{name}") for name in LEFT}
    good = not streams.lost and not streams.wrong and overload.is_good and not any(left.values())
    return {"streams": asdict(streams), "overload": asdict(overload), "left": left, "good": good}


def main() -> int:
    """Parses the command line, starts a server, runs both parts."""
    parser = argparse.ArgumentParser(prog="jcb.bench.load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--slots", type=int, default=32, help="the server's max_num_seqs")
    parser.add_argument("--model", default="default")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    settings = ["--model", options.model, "--max-num-seqs", str(options.slots), "--max-model-len", "512"]
    settings += ["--max-num-batched-tokens", "256", "--dtype", "float32"]
    settings += ["--set", "server.max_connections_per_peer=2048", "--set", "scheduler.queue_timeout=600"]
    settings += ["--set", f"scheduler.max_queued={max(4 * options.slots, options.streams)}"]
    with serving(settings) as url:
        figures = asyncio.run(run(url, options), loop_factory=uvloop.Loop)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print("everything holds" if figures["good"] else f"something does not hold: {figures}")
    return 0 if figures["good"] else 1


PATH = "/v1/completions"
LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "compiles_after_ready_total")
WORDS = ("the", "a", "red", "old", "quick", "river", "house", "said", "went", "under", "light", "but", "why", "moon")

if __name__ == "__main__":
    sys.exit(main())
