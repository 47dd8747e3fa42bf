"""The engine as an event loop sees it: coroutines submit requests and read their outputs.

The steps run in a thread of their own, see `jcb.engine.loop`.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jcb.config import SchedulerConfig
from jcb.engine.admission import ModelInfo, make_requests, validate
from jcb.engine.core import EngineCore
from jcb.engine.feed import StepFeed
from jcb.engine.loop import Abort, Add, EngineLoop, Outputs, Turn, engine_lost
from jcb.engine.output import OutputProcessor, RequestOutput
from jcb.engine.stream import OutputStream
from jcb.metrics import EngineMetrics
from jcb.scheduler.policy import check_can_ever_queue, check_priority, check_queue
from jcb.structured.bad_words import BadWords
from jcb.structured.compiler import GrammarCompiler
from jcb.structured.vocab import vocab_of
from jcb.text.tokenizer import Tokenizer
from jcb.types import Grammar, Request, RequestError, SamplingParams


class EngineState(enum.StrEnum):
    """What the engine is doing, as /ready tells it."""

    LOADING = "loading"
    COMPILING = "compiling"
    IDLE = "idle"
    STEPPING = "stepping"
    STALLED = "stalled"  # something waiting, nothing moving
    DEAD = "dead"


class AsyncEngine:
    """Runs an EngineCore in its own thread for the event loop that called `start`.

    scheduler: its queue limit refuses a submission at once, where the scheduler itself could only between two
    steps. watchdog_seconds: how long work may stand still.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        info: ModelInfo,
        *,
        metrics: EngineMetrics | None = None,
        seed: int | None = None,
        scheduler: SchedulerConfig | None = None,
        watchdog_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.info = info
        self.metrics = metrics or EngineMetrics()
        self.feed = StepFeed(self.metrics, core.scheduler.cached_pages, clock)
        core.metrics = self.feed
        self._processor = OutputProcessor(tokenizer, metrics=self.metrics, clock=clock)
        self._engine = EngineLoop(core, self._processor, self.metrics, self.feed, self._deliver, clock=clock)
        self._encode = partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
        self._grammars = GrammarCompiler(vocab_of(tokenizer, info.vocab_size))
        self._rng: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._scheduler_config = scheduler
        self._watchdog_seconds = watchdog_seconds
        self._clock = clock
        self._open: set[OutputStream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._last_awake = 0.0  # when the process came to after it was stopped

    def start(self) -> None:
        """Starts the thread; call it in the event loop that will read the outputs."""
        self._engine.start()
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> EngineState:
        """Computed from a few plain values; safe from any thread and cheap enough for every probe."""
        engine = self._engine
        if engine.error is not None:
            return EngineState.DEAD
        if not engine.is_started:
            return EngineState.LOADING
        if engine.is_idle:
            return EngineState.IDLE
        still = self._clock() - max(engine.last_progress, self._last_awake)
        return EngineState.STALLED if still > self._watchdog_seconds else EngineState.STEPPING

    @property
    def is_healthy(self) -> bool:
        return self.state in (EngineState.IDLE, EngineState.STEPPING)

    async def until_broken(self, interval: float = 1.0) -> EngineState:
        """Returns when the engine is stalled or dead, and why it can only be restarted."""
        while True:
            asleep = self._clock()
            await asyncio.sleep(interval)
            if self._clock() - asleep > 2 * interval:
                self._last_awake = self._clock()  # the whole process stood still: not the engine's fault
            if self.state in (EngineState.STALLED, EngineState.DEAD):
                return self.state

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Submissions that have not been read to their end or left."""
        return len(self._open)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
    ) -> OutputStream:
        """Admits `params.n` choices of each prompt, all or none; choice k of prompt i has index i * n + k.

        RequestError when any of them cannot be served. Read the stream inside `async with`.
        """
        self._check_open()
        grammar = await self._grammar(params)
        requests: list[Request] = []
        for prompt in prompts:
            requests += make_requests(
                prompt,
                params,
                model=self.info,
                request_id=uuid.uuid4().hex,
                rng=self._rng,
                priority=priority,
                namespace=namespace,
                arrival_time=self._clock(),
                grammar=grammar,
            )
        self._check_queue(requests)
        assert self._loop is not None
        stream = OutputStream([request.request_id for request in requests], self._abort)
        admitted: asyncio.Future[None] = self._loop.create_future()
        self._open.add(stream)
        try:
            self._engine.send(Add(requests, stream, admitted))
            await admitted
        except BaseException as error:
            stream.close()
            self._open.discard(stream)
            if isinstance(error, RequestError) and error.status in (429, 503):
                self.metrics.admission_rejections.inc()
            raise
        return stream

    def check_room(self) -> None:
        """RequestError 429 when the queue is too full for any request whatever: `submit` would refuse it too.

        It spares what is full already the work of reading what it refuses.
        """
        self._check_room(1, 1)

    async def turn(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """Changes knobs between two steps, all or none; RequestError 400 for a value outside its bounds."""
        self._check_open()
        assert self._loop is not None
        turned: asyncio.Future[SchedulerConfig] = self._loop.create_future()
        self._engine.send(Turn(changes, turned))
        config = await turned
        if self._scheduler_config is not None:
            self._scheduler_config = config
        return config

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt's choices as they come; closing the iterator aborts them."""
        stream = await self.submit([prompt_token_ids], params, priority=priority, namespace=namespace)
        async with stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for the running ones, then ends the rest with an error."""
        self._draining = True
        deadline = self._clock() + seconds
        while any(not stream.finished for stream in self._open) and self._clock() < deadline:
            await asyncio.sleep(0.02)
        error = RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5.0)
        self._engine.send(Abort(None, error))
        patience = self._clock() + 2.0
        while any(not stream.finished for stream in self._open) and self._clock() < patience:
            await asyncio.sleep(0.01)

    def stop(self, timeout: float = 5.0) -> bool:
        """Ends the thread after the step it is in; False when that step did not end in time."""
        self._grammars.close()
        return self._engine.stop(timeout)

    def _check_open(self) -> None:
        if self._engine.error is not None:
            raise engine_lost()
        if self._draining or self._engine.is_stopping or not self._engine.is_started:
            word = "shutting down" if self._engine.is_started else "starting"
            raise RequestError(f"the server is {word}", status=503, code="unavailable", retry_after=5.0)

    async def _grammar(self, params: SamplingParams) -> Grammar | None:
        """What the answer must follow, compiled; None for free text."""
        if params.structured is None and not params.bad_words:
            return None
        validate(params, self.info)
        grammar: Grammar | None = None
        if params.structured is not None:
            grammar = await self._grammars.compile(params.structured)
            self._check_open()
        if params.bad_words:
            grammar = BadWords(params.bad_words, self._encode, self.info.vocab_size, grammar)
        return grammar

    def _check_queue(self, requests: list[Request]) -> None:
        if self._scheduler_config is None or self.info.limits is None or not requests:
            return
        check_priority(self._scheduler_config, requests[0].priority)
        check_can_ever_queue(self._scheduler_config, self.info.limits, requests)
        self._check_room(len(requests), sum(len(request.prompt_token_ids) for request in requests))

    def _check_room(self, count: int, prompt_tokens: int) -> None:
        config, limits, scheduler = self._scheduler_config, self.info.limits, self.core.scheduler
        if config is None or limits is None:
            return
        waiting = scheduler.num_waiting + self._engine.num_in_inbox
        tokens = scheduler.num_waiting_tokens + self._engine.tokens_in_inbox
        try:
            check_queue(config, limits, waiting, tokens, count=count, prompt_tokens=prompt_tokens)
        except RequestError:
            self.metrics.admission_rejections.inc()
            raise

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.send(Abort(request_ids))

    def _deliver(self, outputs: Outputs) -> None:
        for stream, output in outputs:
            stream.put(output)
            if stream.finished:
                self._open.discard(stream)
