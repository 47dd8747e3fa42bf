"""Compiling beside the server: limits that hold, one compilation for equal requests, nothing left behind."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import threading
import time

import pytest

from jcb.structured import compiler as module
from jcb.structured.compiler import GrammarCompiler
from jcb.structured.vocab import vocab_of
from jcb.types import RequestError, Structured
from tests.fake_model import byte_tokenizer

pytest.importorskip("llguidance")

TOKENIZER = byte_tokenizer()
VOCAB = vocab_of(TOKENIZER, TOKENIZER.vocab_size)
SIMPLE = Structured(kind="regex", source="[0-9]{3}")


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(VOCAB)
    yield made
    made.close()


def regex(source: str) -> Structured:
    return Structured(kind="regex", source=source)


def schema(value: dict) -> Structured:
    return Structured(kind="json", source=json.dumps(value))


DOUBLING = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "a"\nstart: r0'
HOSTILE = [
    schema({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]}),
    schema({"anyOf": [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(400)]}),
    schema({"type": "array", "minItems": 10**9, "items": {"const": "x" * 1000}}),
    schema({"const": "ab " * 20_000}),
    schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    schema({"type": "string", "minLength": 10**9}),
    schema({"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}}
           | {"$ref": "#/$defs/d0"}),
    regex("a{1000000}"),
    regex("a{10000}"),
    schema({"items": {"const": "ab " * 1300}, "type": "array", "minItems": 500}),
    regex("((a{100}){100}){100}"),
    regex("(?:a?){1000}a{1000}"),
    regex("(x+x+)+y"),
    regex("(.*){100}x"),
    regex(".*a.{500}b"),
    regex("(" * 1000 + ")" * 1000),
    regex(r"(\p{L}|\p{N}){1,2000}" * 20),
    Structured(kind="grammar", source='start: s\ns: s s | "a" | ""'),
    Structured(kind="grammar", source=DOUBLING),
]  # fmt: skip


@pytest.mark.parametrize("structured", HOSTILE, ids=lambda s: s.source[:24])
def test_hostile_ones_are_refused_or_compiled_in_five_seconds(compiler, structured):
    compiler.submit(SIMPLE).result()  # the worker is there
    begin = time.perf_counter()
    with contextlib.suppress(RequestError):
        future = compiler.submit(structured)
        error = future.exception()
        if error is None:
            assert future.result().start(frozenset()).error is None
        else:
            assert (error.status, error.param) == (400, structured.param)
    assert time.perf_counter() - begin < module.TRIAL_SECONDS + 3
    assert compiler.submit(regex("ok|fine")).result()


def test_hostile_ones_stay_within_their_memory(compiler):
    """The worker is the only child that is larger than this test: its peak is its own limit above an empty one."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = GrammarCompiler(VOCAB, seconds=20, memory_bytes=64 << 20)
    with pytest.raises(RequestError, match=r"64 MiB of memory|too much memory") as caught:
        made.submit(HOSTILE[0]).result()
    made.close()
    assert caught.value.status == 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_a_grammar_that_takes_too_long_costs_one_worker_and_no_thread():
    made = GrammarCompiler(VOCAB, seconds=1)
    threads = threading.active_count()
    for _ in range(2):
        begin = time.perf_counter()
        with pytest.raises(RequestError, match="more than 1 s") as caught:
            made.submit(HOSTILE[0]).result()
    assert caught.value.code == "grammar_too_complex"
    assert time.perf_counter() - begin < 0.1, "the refusal is remembered"
    assert made.submit(SIMPLE).result()
    made.close()
    assert threading.active_count() <= threads + 2


def test_equal_ones_are_compiled_once(compiler, monkeypatch):
    asked = []
    try_out = module._Worker.try_out
    monkeypatch.setattr(module._Worker, "try_out", lambda w, s: asked.append(s) or try_out(w, s))
    same = [compiler.submit(regex("[a-c]{5}")) for _ in range(9)]
    assert len({id(future.result()) for future in same}) == 1
    assert len(asked) == 1


def test_a_refusal_is_a_new_error_each_time(compiler):
    errors = []
    for _ in range(3):
        with pytest.raises(RequestError, match="unclosed group") as caught:
            compiler.submit(regex("(")).result()
        errors.append(caught.value)
    assert len(set(map(id, errors[1:]))) == 2


def test_the_cache_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(module, "CACHE_BYTES", 3 * module._cost(regex("a0")))
    made = GrammarCompiler(VOCAB)
    for index in range(6):
        made.submit(regex(f"a{index}")).result()
    gc.collect()
    assert [known.source for known in made._known] == ["a3", "a4", "a5"]
    made.close()


def test_too_many_at_once_are_told_to_come_back(monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    made = GrammarCompiler(VOCAB)
    waiting = [made.submit(regex(f"b{index}")) for index in range(2)]
    with pytest.raises(RequestError) as caught:
        made.submit(regex("b9"))
    assert caught.value.status == 429
    assert [future.result() for future in waiting]
    made.close()


async def test_a_caller_that_leaves_does_not_stop_it_for_others(compiler):
    first = asyncio.create_task(compiler.compile(regex("c{3}")))
    second = asyncio.create_task(compiler.compile(regex("c{3}")))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).start(frozenset()).error is None


def test_a_dead_worker_is_replaced(compiler):
    compiler.submit(SIMPLE).result()
    for worker in compiler._idle:
        worker._process.kill()
        worker._process.wait()
    assert compiler.submit(regex("d1")).result()


def test_a_worker_may_wait_longer_than_it_may_work(monkeypatch):
    made = GrammarCompiler(VOCAB, seconds=1)
    made.submit(SIMPLE).result()
    (worker,) = made._idle
    time.sleep(2.5)
    assert worker.is_fit
    made.close()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    made = GrammarCompiler(VOCAB)
    with pytest.raises(RequestError, match="pip install 'llguidance") as caught:
        made.submit(SIMPLE).result()
    assert caught.value.status == 501
    made.close()


def test_a_tokenizer_of_an_unknown_kind_is_refused():
    with pytest.raises(RequestError, match="this model's tokenizer"):
        GrammarCompiler(None).submit(SIMPLE)


def test_compiled_in_place_for_a_trusted_caller(compiler):
    assert compiler.compile_here(SIMPLE).start(frozenset()).error is None
    with pytest.raises(RequestError, match="unclosed group"):
        compiler.compile_here(regex("("))


def status_of(compiler, structured):
    """The status of the refusal, and its code."""
    with pytest.raises(RequestError) as caught:
        compiler.submit(structured).result(30)
    return caught.value.status, caught.value.code


@pytest.fixture
def own_compiler():
    made = GrammarCompiler(VOCAB, seconds=1)
    yield made
    made.close()


def worker_of(compiler):
    compiler.submit(regex("warm")).result(30)
    return compiler._idle[-1]._process


def test_a_machine_that_starts_no_process_is_no_fault_of_the_request(own_compiler, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(module.subprocess, "Popen", fails)
        assert status_of(own_compiler, SIMPLE) == (503, "grammar_unavailable")
    assert own_compiler.submit(SIMPLE).result(30)


def test_a_worker_that_was_given_no_time_is_no_fault_of_the_request(own_compiler):
    """On a busy machine a simple grammar's seconds may pass before the worker runs; that is not remembered."""
    os.kill(worker_of(own_compiler).pid, signal.SIGSTOP)
    assert status_of(own_compiler, SIMPLE) == (503, "grammar_unavailable")
    assert own_compiler.submit(SIMPLE).result(30)


def test_a_worker_that_someone_killed_is_no_fault_of_the_request(own_compiler, monkeypatch):
    process = worker_of(own_compiler)
    process.kill()
    process.wait()
    monkeypatch.setattr(module._Worker, "is_fit", True)  # it died between the look and the question
    assert status_of(own_compiler, SIMPLE) == (503, "grammar_unavailable")


def test_what_goes_wrong_here_is_no_500(own_compiler, monkeypatch):
    def fails(*args):
        raise ValueError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(module, "CompiledGrammar", fails)
        assert status_of(own_compiler, SIMPLE) == (400, "invalid_grammar")

    def breaks(*args):
        raise RuntimeError("secret words")

    with monkeypatch.context() as patch:
        patch.setattr(module, "try_out", breaks)
        assert status_of(own_compiler, regex("x")) == (503, "grammar_unavailable")
    assert own_compiler.submit(regex("x")).result(30)


async def test_after_the_end_a_grammar_is_refused(own_compiler):
    own_compiler.close()
    with pytest.raises(RequestError) as caught:
        await own_compiler.compile(SIMPLE)
    assert (caught.value.status, caught.value.retry_after) == (503, 5.0)


async def test_a_grammar_that_waits_at_the_end_is_refused(own_compiler):
    waiting = [asyncio.create_task(own_compiler.compile(regex(f"a{i}"))) for i in range(20)]
    await asyncio.sleep(0)
    own_compiler.close()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert not isinstance(result, BaseException) or getattr(result, "status", 0) == 503, repr(result)
