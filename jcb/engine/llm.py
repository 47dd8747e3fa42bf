"""The engine as a function: prompts in, finished answers out, in the caller's thread."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from jcb.config import ServeConfig, replace
from jcb.config_file import override
from jcb.engine.admission import make_requests, validate
from jcb.engine.choice import Choice
from jcb.engine.output import OutputProcessor
from jcb.structured.bad_words import BadWords
from jcb.structured.compiler import GrammarCompiler
from jcb.structured.vocab import vocab_of
from jcb.types import FinishReason, Grammar, Logprobs, Request, SamplingParams, Structured

if TYPE_CHECKING:
    from jcb.engine.build import Engine

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class RequestResult:
    """The answer to one prompt: `outputs` holds its n choices. A choice that failed has `error` set."""

    prompt_token_ids: tuple[int, ...]
    outputs: list[Choice] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's token ids."""
        return self.outputs[0].token_ids

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """Entry i belongs to prompt token i + 1."""
        return self.outputs[0].prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        return self.outputs[0].num_cached_tokens


class LLM:
    """A loaded model that answers in batches.

    model: "default", a GGUF file, or a Hugging Face folder. `overrides` are config fields by name, whatever
    section they are in (max_model_len, max_num_seqs, dtype, page_size, seed, …). `config` replaces `model`, and the
    overrides change it. progress(stage, done, total) is called while the model loads and compiles.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        config: ServeConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        from jcb.engine.build import load_engine

        config = _without_timeouts(override(config or ServeConfig(model=model), overrides))
        self._use(load_engine(config, progress=progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """An LLM over an engine that exists; nothing else may step it meanwhile."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        seed = engine.config.engine.seed
        self.engine = engine
        self._grammars = GrammarCompiler(vocab_of(engine.tokenizer, engine.info.vocab_size))
        self._compiled: dict[Structured, Grammar] = {}
        self._rng: random.Random = random.SystemRandom() if seed is None else random.Random(seed)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestResult]:
        """Answers all prompts (text or token ids), in their order; one SamplingParams, or one a prompt.

        RequestError when any of them cannot be served; nothing of the others is kept then.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(texts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(texts):
            raise ValueError(f"{len(each)} sampling params for {len(texts)} prompts: give one, or one for each")
        encode = self.engine.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in texts]
        return self._run(ids, each, progress)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *, progress: bool = False
    ) -> RequestResult:
        """The next turn of one conversation, through the model's chat template."""
        from jcb.text.chat import encode_chat

        if self.engine.chat_template is None:
            raise ValueError("this model has no chat template: use generate()")
        turns = [dict(message) for message in messages]
        ids = encode_chat(self.engine.tokenizer, self.engine.chat_template, turns)
        return self._run([ids], [params or SamplingParams()], progress)[0]

    def compile(self, structured: Structured) -> Grammar:
        """The grammar of `structured`; equal ones are compiled once."""
        if structured not in self._compiled:
            self._compiled[structured] = self._grammars.compile_here(structured)
        return self._compiled[structured]

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], show: bool) -> list[RequestResult]:
        results = [RequestResult(tuple(prompt)) for prompt in prompts]
        backlog: deque[tuple[Request, int]] = deque()
        choices: dict[str, Choice] = {}
        for prompt, each, result in zip(prompts, params, results, strict=True):
            for index, request in enumerate(self._requests(prompt, each)):
                choice = choices[request.request_id] = Choice(index=index)
                result.outputs.append(choice)
                backlog.append((request, index))
        total = len(backlog)
        processor = OutputProcessor(self.engine.tokenizer)
        try:
            while backlog or len(processor):
                self._feed(backlog, processor)
                outputs, stopped = processor.process(self.engine.core.step())
                for request_id in stopped:
                    self.engine.core.abort(request_id, FinishReason.STOP)
                for output in outputs:
                    choices[output.request_id].absorb(output)
                if show:
                    _show(total - len(backlog) - len(processor), total)
        except BaseException:
            for request_id in choices:
                self.engine.core.abort(request_id, FinishReason.ABORT)
            raise
        return results

    def _requests(self, prompt: list[int], params: SamplingParams) -> list[Request]:
        info = self.engine.info
        params = validate(params, info)
        grammar = None if params.structured is None else self.compile(params.structured)
        if params.bad_words:
            encode = partial(self.engine.tokenizer.encode, add_special_tokens=False, parse_special=False)
            grammar = BadWords(params.bad_words, encode, info.vocab_size, grammar)
        request_id = uuid.uuid4().hex
        return make_requests(prompt, params, model=info, request_id=request_id, rng=self._rng, grammar=grammar)

    def _feed(self, backlog: deque[tuple[Request, int]], processor: OutputProcessor) -> None:
        """Keeps a short queue at the scheduler's door: its limits are for callers that can be told to wait."""
        core = self.engine.core
        while backlog and core.scheduler.num_waiting < self.engine.config.scheduler.max_num_seqs:
            request, index = backlog.popleft()
            request = dataclasses.replace(request, arrival_time=time.monotonic())
            core.add(request)
            processor.add(request, index)


def _without_timeouts(config: ServeConfig) -> ServeConfig:
    """Offline nobody waits at a socket: a long batch must not time out."""
    return replace(config, "scheduler", queue_timeout=math.inf, run_timeout=math.inf)


def _show(done: int, total: int) -> None:
    print(f"\r{done} of {total} done", end="\n" if done == total else "", file=sys.stderr, flush=True)
