"""The engine's thread and the event loop's side of it."""

import asyncio
import threading
import time

import pytest

from jcb.engine import loop as engine_loop
from jcb.engine.async_engine import AsyncEngine, EngineState
from jcb.engine.output import RequestOutput
from jcb.engine.stream import OutputStream
from jcb.types import FinishReason, RequestError, SamplingParams
from tests.fake_model import fake_engine


@pytest.fixture
async def engine():
    parts = fake_engine()
    engine = AsyncEngine(parts.core, parts.tokenizer, parts.info, seed=1)
    engine.executor = parts.executor
    engine.start()
    yield engine
    assert engine.stop()


async def idle(engine):
    async with asyncio.timeout(3):
        while engine.state is not EngineState.IDLE or engine.num_open:
            await asyncio.sleep(0.005)
    engine.core.scheduler.check_integrity()
    assert engine.core.scheduler.stats()["pages_used"] == 0


async def test_generate_gives_every_token_and_one_end(engine):
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True)
    outputs = [output async for output in engine.generate([1, 2, 3], params)]
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        assert sum(len(output.token_ids) for output in own) == 9
        assert [output.finish_reason for output in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish_reason is FinishReason.LENGTH
    await idle(engine)


async def test_closing_the_iterator_aborts(engine):
    engine.executor.step_seconds = 0.005
    outputs = engine.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(outputs)
    await outputs.aclose()
    await idle(engine)


async def test_a_cancelled_reader_aborts(engine):
    engine.executor.step_seconds = 0.005

    async def read():
        async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(engine)


async def test_a_refusal_is_raised_before_anything_is_read(engine):
    for prompt, params in (([], SamplingParams()), ([1], SamplingParams(top_p=0)), ([1] * 300, SamplingParams())):
        with pytest.raises(RequestError):
            await engine.submit([[1, 2], prompt], params)
    await idle(engine)


async def test_the_threads_last_words(engine):
    engine.executor.step_seconds = 0.005
    stream = await engine.submit([[1, 2]], SamplingParams(max_tokens=100, ignore_eos=True))

    def broken(outputs):
        raise RuntimeError

    engine._processor.process = broken
    async with stream, asyncio.timeout(2):
        outputs = [output for batch in [b async for b in stream] for output in batch]
    assert outputs[-1].error.code == "engine_lost"
    assert engine.state is EngineState.DEAD
    with pytest.raises(RequestError) as caught:
        await engine.submit([[1]], SamplingParams())
    assert caught.value.status == 503


async def test_submissions_taken_together_all_hear_of_a_broken_loop(engine):
    """The loop dies while it admits the first of several: none of them may wait for ever."""

    def broken(request):
        raise KeyError("a fault in the scheduler")

    engine.core.add = broken
    tasks = [asyncio.ensure_future(engine.submit([[1]], SamplingParams())) for _ in range(3)]
    async with asyncio.timeout(2):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.status for error in found] == [503, 503, 503]


async def test_before_start_nothing_is_admitted():
    parts = fake_engine()
    engine = AsyncEngine(parts.core, parts.tokenizer, parts.info)
    assert engine.state is EngineState.LOADING
    with pytest.raises(RequestError):
        await engine.submit([[1]], SamplingParams())
    assert engine.stop()


async def test_b183_drain_with_no_time_does_not_wait(engine):
    engine.executor.step_seconds = 0.005
    stream = await engine.submit([[1, 2]], SamplingParams(max_tokens=200, ignore_eos=True))
    for seconds in (0.0, -5.0):
        await asyncio.wait_for(engine.drain(seconds), 1.0)
    async with stream:
        last = [batch async for batch in stream][-1][-1]
    assert (last.finish_reason, last.error.status) == (FinishReason.ABORT, 503)
    await idle(engine)


async def test_b185_the_thread_sleeps_when_idle(engine):
    async for _ in engine.generate([1], SamplingParams(max_tokens=3)):
        pass
    await idle(engine)
    began = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - began < 0.02


async def test_one_wake_up_a_step(engine, monkeypatch):
    """All outputs of a step reach the loop together."""
    wake_ups = []
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe

    def counted(function, *args):
        if threading.current_thread().name == "jcb-engine" and function == engine._deliver:
            wake_ups.append(len(args[0]))
        return original(function, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    async for _ in engine.generate([1, 2], SamplingParams(n=8, max_tokens=20, ignore_eos=True)):
        pass
    assert sum(wake_ups) == 160
    assert len(wake_ups) <= 30


def output(request_id, text="", end=None):
    return RequestOutput(request_id, text=text, finish_reason=end)


async def test_b065_b067_a_stream_loses_nothing_to_early_or_spurious_wake_ups():
    aborted = []
    stream = OutputStream(["a", "b"], aborted.extend)
    stream.put(output("a", "1"))
    stream._wake.set()
    assert [o.text for o in await anext(stream)] == ["1"]
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream._wake.set()  # with nothing there
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(output("a", "2", FinishReason.STOP))
    stream.put(output("a", "late"))
    stream.put(output("b", "3", FinishReason.LENGTH))
    assert [o.text for o in await reader] == ["2", "3"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    stream.close()
    assert aborted == []


async def test_a_stream_that_is_left_aborts_what_is_unfinished_once():
    aborted = []
    async with OutputStream(["a", "b"], aborted.extend) as stream:
        stream.put(output("a", end=FinishReason.STOP))
    stream.close()
    assert aborted == ["b"]
    stream.put(output("b", end=FinishReason.ABORT))
    assert stream.finished


async def test_until_broken_returns_for_a_stalled_and_for_a_dead_engine():
    parts = fake_engine()
    engine = AsyncEngine(parts.core, parts.tokenizer, parts.info, watchdog_seconds=0.1)
    engine.start()
    broken = asyncio.create_task(engine.until_broken(0.01))
    await asyncio.sleep(0.3)
    assert not broken.done()  # idle is not stalled
    parts.executor.step_seconds = 0.5
    stream = await engine.submit([[1]], SamplingParams(max_tokens=1))
    assert await asyncio.wait_for(broken, 2) is EngineState.STALLED
    async with stream:
        async for _ in stream:
            pass
    assert engine.stop()


async def test_a_process_that_stood_still_is_not_a_stalled_engine():
    """As after SIGSTOP: the clock has run on, and nobody could have moved."""
    missed = 0.0
    parts = fake_engine()
    engine = AsyncEngine(
        parts.core, parts.tokenizer, parts.info, watchdog_seconds=5.0, clock=lambda: time.monotonic() + missed
    )
    engine.start()
    parts.executor.step_seconds = 0.5
    stream = await engine.submit([[1]], SamplingParams(max_tokens=1))
    broken = asyncio.create_task(engine.until_broken(0.02))
    await asyncio.sleep(0.1)
    missed = 60.0
    async with stream:
        assert [batch async for batch in stream]
    assert not broken.done()
    broken.cancel()
    assert engine.stop()


async def test_the_books_are_checked_once_the_engine_is_idle(engine, monkeypatch):
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 0.05)
    checks = []
    monkeypatch.setattr(engine.core.scheduler, "check_integrity", lambda: checks.append(engine.state))
    await asyncio.sleep(0.2)
    assert checks == []  # nothing has run
    for _ in range(2):
        async for _ in engine.generate([1], SamplingParams(max_tokens=3)):
            pass
    await asyncio.sleep(0.3)
    assert checks == [EngineState.IDLE]


async def test_an_idle_engine_that_lost_a_page_is_dead(engine, monkeypatch):
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 0.05)
    async for _ in engine.generate([1], SamplingParams(max_tokens=3)):
        pass
    engine.core.scheduler._pages._pool.allocate(1)
    assert await asyncio.wait_for(engine.until_broken(0.02), 3) is EngineState.DEAD
