"""One benchmark of a server: samples made, requests sent when they are due, figures printed and saved."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from jcb.bench.serving.arrivals import Arrivals
from jcb.bench.serving.client import ENDPOINTS, Backend, Outcome, make_body, send
from jcb.bench.serving.codec import Codec, LocalCodec, RemoteCodec
from jcb.bench.serving.datasets import Dataset, Sample
from jcb.bench.serving.figures import DETAILS, Wanted, error_lines, figures, lines

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server and how it is spoken to. endpoint: "" is the backend's own; model: "" asks the server."""

    backend: Backend = "openai"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = ""
    model: str = ""
    served_model_name: str = ""
    tokenizer: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    ready_seconds: float = 0.0
    seconds: float = 6 * 3600.0  # of one request

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is sent and when. max_concurrency: None is no limit. request_id_prefix: "" sends no ids."""

    num_prompts: int = 1000
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    request_id_prefix: str = ""
    profile: bool = False

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"--num-prompts {self.num_prompts} must be at least 1")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency {self.max_concurrency} must be at least 1")
        if self.num_warmups < 0:
            raise ValueError(f"--num-warmups {self.num_warmups} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Whether and where the result is written. details: keep one entry a request; append: add to the file."""

    is_wanted: bool = False
    details: bool = False
    append: bool = False
    folder: str = ""
    filename: str = ""
    label: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def path(self, target: Target, arrivals: Arrivals, load: Load, date: str) -> Path:
        """The file's place; vLLM's pattern of a name unless one was given."""
        limit = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
        rate = f"{arrivals.rate}qps"
        if arrivals.ramp:
            rate = f"ramp-up-{arrivals.ramp}-{arrivals.ramp_start:g}qps-{arrivals.ramp_end:g}qps"
        name = f"{self.label or target.backend}-{rate}{limit}-{target.model.split('/')[-1]}-{date}.json"
        return Path(self.folder) / (self.filename or name)


async def benchmark(
    target: Target,
    dataset: Dataset,
    arrivals: Arrivals,
    load: Load,
    wanted: Wanted,
    saving: Saving,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run it, print vLLM's block, save what `saving` asks for; the figures under vLLM's keys.

    Raises ValueError where the server or the data make a benchmark impossible; failed requests are counted instead.
    """
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=target.seconds)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        target = await _named(session, target)
        name = target.served_model_name or target.model
        codec: Codec = (
            LocalCodec(target.tokenizer)
            if target.tokenizer
            else RemoteCodec(session, target.base_url.rstrip("/"), name, target.headers)
        )
        samples = await dataset.samples(load.num_prompts, load.seed, codec)
        sender = _Sender(session, target, load, progress)
        await sender.prepare(samples[0], say)
        _announce(arrivals, load, say)
        began = time.perf_counter()
        outcomes = await sender.send_all(samples, arrivals.offsets(len(samples), load.seed).tolist())
        seconds = time.perf_counter() - began
        if load.profile:
            await sender.profile("stop")
    result = figures(outcomes, seconds, wanted)
    for line in lines(result, wanted, rate=arrivals.rate, max_concurrency=load.max_concurrency):
        say(line)
    for line in error_lines(result):
        say(line)
    if any(outcome.is_success and not outcome.has_usage for outcome in outcomes):
        say("the server sent no usage: output tokens are counted by events, prompt tokens by the tokenizer")
    if saving.is_wanted:
        say(f"wrote {save(result, target, arrivals, load, saving)}")
    return result


def save(result: Mapping[str, Any], target: Target, arrivals: Arrivals, load: Load, saving: Saving) -> Path:
    """Write the result's JSON; the path."""
    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    kept = {key: value for key, value in result.items() if saving.details or key not in DETAILS}
    head = {
        "date": date,
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": saving.label or None,
        "model_id": target.model,
        "tokenizer_id": target.tokenizer or target.model,
        "num_prompts": load.num_prompts,
        **saving.metadata,
        "request_rate": "inf" if math.isinf(arrivals.rate) else arrivals.rate,
        "burstiness": arrivals.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    if arrivals.ramp:
        head |= {
            "ramp_up_strategy": arrivals.ramp,
            "ramp_up_start_rps": arrivals.ramp_start,
            "ramp_up_end_rps": arrivals.ramp_end,
        }
    path = saving.path(target, arrivals, load, date)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if saving.append else "w", encoding="utf-8") as file:
        if saving.append and file.tell():
            file.write("\n")
        json.dump(head | kept, file)
    return path


async def _named(session: aiohttp.ClientSession, target: Target) -> Target:
    """`target` with the model's name; asked of the server when it was not given. ValueError if it cannot say."""
    if target.model:
        return target
    url = f"{target.base_url.rstrip('/')}/v1/models"
    try:
        async with session.get(url, headers=target.headers) as response:
            body = await response.json()
            names = [entry["id"] for entry in body["data"]] if response.status == 200 else []
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{url} does not answer ({error}): is the server running? --model names the model") from error
    if not names:
        raise ValueError(f"{url} names no model: give --model")
    return dataclasses.replace(target, model=names[0])


def _announce(arrivals: Arrivals, load: Load, say: Callable[[str], None]) -> None:
    """The lines before the run."""
    say("Starting main benchmark run...")
    if arrivals.ramp:
        say(f"Traffic ramp-up strategy: {arrivals.ramp}.")
        say(f"Will increase RPS from {arrivals.ramp_start:g} to {arrivals.ramp_end:g} RPS over the benchmark.")
    else:
        say(f"Traffic request rate: {arrivals.rate}")
    kind = "Poisson process" if arrivals.burstiness == 1 else "Gamma distribution"
    say(f"Burstiness factor: {arrivals.burstiness} ({kind})")
    say(f"Maximum request concurrency: {load.max_concurrency}")


class _Sender:
    """Sends samples to one server."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, load: Load, progress: Progress | None = None
    ) -> None:
        self._session, self._target, self._load = session, target, load
        self._progress = progress or (lambda stage, done, total: None)
        limit = load.max_concurrency
        self._gate = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._done = 0

    async def prepare(self, sample: Sample, say: Callable[[str], None]) -> None:
        """Wait for the server, warm it up, start its profiler, each where asked for."""
        if self._target.ready_seconds:
            say("Starting initial single prompt test run...")
            await self._until_ready(sample)
        if self._load.num_warmups:
            say(f"Warming up with {self._load.num_warmups} requests...")
            await asyncio.gather(*[self._one(sample, "warm-up") for _ in range(self._load.num_warmups)])
        if self._load.profile:
            await self.profile("start")

    async def profile(self, verb: str) -> None:
        """Start or stop the server's profiler; ValueError when it refuses."""
        url = f"{self._target.base_url.rstrip('/')}/{verb}_profile"
        async with self._session.post(url, headers=self._target.headers) as response:
            if response.status != 200:
                raise ValueError(f"--profile: {url} answers {response.status}")

    async def send_all(self, samples: Sequence[Sample], offsets: Sequence[float]) -> list[Outcome]:
        """Send sample i `offsets[i]` seconds from now; the outcomes in order."""
        began, tasks = time.perf_counter(), []
        self._progress("requests", 0, len(samples))

        async def one(index: int, sample: Sample) -> Outcome:
            outcome = await self._one(sample, str(index))
            self._done += 1
            self._progress("requests", self._done, len(samples))
            return outcome

        for index, (sample, offset) in enumerate(zip(samples, offsets, strict=True)):
            if (pause := began + offset - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(one(index, sample)))
        return list(await asyncio.gather(*tasks))

    async def _one(self, sample: Sample, number: str) -> Outcome:
        """One request, when --max-concurrency lets it."""
        target, arrived = self._target, time.perf_counter()
        model = target.served_model_name or target.model
        body = make_body(target.backend, model, sample.prompt, sample.output_tokens, target.fields)
        headers = dict(target.headers)
        if self._load.request_id_prefix:
            headers["X-Request-Id"] = self._load.request_id_prefix + number
        async with self._gate:
            outcome = await send(self._session, target.url, body, sample.prompt_tokens, headers)
        outcome.queued = outcome.start - arrived
        return outcome

    async def _until_ready(self, sample: Sample) -> None:
        """Ask every few seconds until one request is answered; ValueError when none is in time."""
        end = time.monotonic() + self._target.ready_seconds
        while not (outcome := await self._one(sample, "ready")).is_success:
            if time.monotonic() > end:
                raise ValueError(
                    f"no answer within --ready-check-timeout-sec {self._target.ready_seconds}: {outcome.error}"
                )
            await asyncio.sleep(min(2.0, self._target.ready_seconds / 10))


def default_headers() -> dict[str, str]:
    """The key in OPENAI_API_KEY as vLLM's benchmark sends it; nothing without one."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}
