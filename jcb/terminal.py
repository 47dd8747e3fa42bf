"""What jcb shows in a terminal: progress while a model loads, texts as they are written, a small chat."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from jcb.config import ServeConfig
from jcb.types import FinishReason, RequestError, SamplingParams

if TYPE_CHECKING:
    from jcb.chips import Topology
    from jcb.engine.build import Engine

ProgressCallback = Callable[[str, int, int], None]
"""(stage, done, total), the last two counted in whatever the stage is made of, or in bytes."""

_STAGES = {"load": "loading weights", "compile": "compiling", "cache": "making the KV cache"}


@contextlib.contextmanager
def load_progress() -> Generator[ProgressCallback]:
    """A callback for `load_engine`, from any thread: bars on a terminal, else a line now and then, on stderr."""
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TextColumn("{task.fields[amount]:>16}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), amount="")
            bars.update(tasks[stage], completed=done, total=total, amount=_amount(done, total))

        yield show


class _PlainProgress:
    """A line when a stage begins, every five seconds in it, and when it is done."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._began = 0.0
        self._printed = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage != self._stage:
            self._stage, self._began, self._printed = stage, now, -float("inf")
        if now - self._printed < 5.0 and done < total:
            return
        self._printed = now
        line = f"{_STAGES.get(stage, stage)}: {_amount(done, total)} ({now - self._began:.1f} s)"
        print(line, file=sys.stderr, flush=True)


def _amount(done: int, total: int) -> str:
    if total >= 1_000_000:  # bytes: no stage has so many of anything else
        return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"{done} of {total}"


def preflight(config: ServeConfig, topology: Topology, *, only: tuple[str, ...], as_json: bool) -> int:
    """Prints what `config` needs of chips that are not here; exit status 1 when something would fail there."""
    from jcb.aot import table
    from jcb.aot.preflight import check

    with load_progress() as progress:
        report = check(config, topology, only=only, progress=progress)
    if as_json:
        print(table.to_json(report))
    else:
        table.show(report)
    return 1 if report.problems else 0


def generate(config: ServeConfig, prompts: Sequence[str], params: SamplingParams) -> int:
    """Prints each prompt's continuation on its own line; exit status 0."""
    from jcb.engine.llm import LLM

    with load_progress() as progress:
        llm = LLM(config=config, progress=progress)
    for result in llm.generate(prompts, params):
        if error := result.outputs[0].error:
            raise error
        print(result.text)
    return 0


def chat(config: ServeConfig, params: SamplingParams, *, system: str = "") -> int:
    """Answers each line read, streaming, until end of input. Ctrl-C ends an answer, /new the conversation."""
    from jcb.engine.build import load_engine

    with load_progress() as progress:
        engine = load_engine(config, progress=progress)
    if engine.chat_template is None:
        raise ValueError("this model has no chat template: give one with --chat-template FILE")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() its line editing)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    print(f"Chat with {engine.info.name}. /new starts over, Ctrl-D ends.")
    while (line := _read_line()) is not None:
        if line == "/new":
            messages = list(beginning)
        elif line:
            messages = _turn(engine, messages, line, params)
    print()
    return 0


def _read_line() -> str | None:
    try:
        return input("\n> ").strip()
    except EOFError:
        return None


def _turn(engine: Engine, messages: list[dict], line: str, params: SamplingParams) -> list[dict]:
    """Asks and prints one answer; the conversation after it (unchanged when the request cannot be served)."""
    from jcb.text.chat import encode_chat

    assert engine.chat_template is not None
    asked = [*messages, {"role": "user", "content": line}]
    pieces: list[str] = []
    try:
        prompt = encode_chat(engine.tokenizer, engine.chat_template, asked)
        for text in stream(engine, prompt, params):
            pieces.append(text)
            print(text, end="", flush=True)
    except RequestError as error:
        print(f"{error}\n(/new starts over)")
        return messages
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return [*asked, {"role": "assistant", "content": "".join(pieces)}]


_numbers = itertools.count()


def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
    """The text that follows `prompt`, as it comes, stepping the engine here. RequestError when it cannot be served."""
    from jcb.engine.admission import make_requests
    from jcb.engine.output import OutputProcessor

    (request,) = make_requests(
        prompt,
        params,
        model=engine.info,
        request_id=f"terminal-{next(_numbers)}",
        rng=random.Random(engine.config.engine.seed),
        arrival_time=time.monotonic(),
    )
    processor = OutputProcessor(engine.tokenizer)
    engine.core.add(request)
    processor.add(request)
    try:
        while engine.core.has_work:
            outputs, stopped = processor.process(engine.core.step())
            for request_id in stopped:
                engine.core.abort(request_id, FinishReason.STOP)
            for output in outputs:
                if output.error is not None:
                    raise output.error
                yield output.text
    finally:
        engine.core.abort(request.request_id, FinishReason.ABORT)
