"""A model whose vocabulary is the 256 bytes, some words and the marks of ChatML, and whose answers are scripted."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from jcb.config import CacheConfig, Limits, SchedulerConfig, ServeConfig
from jcb.engine.admission import ModelInfo
from jcb.engine.core import EngineCore
from jcb.metrics import EngineMetrics
from jcb.scheduler.scheduler import Scheduler
from jcb.text.chat import ChatTemplate
from jcb.text.tokenizer import Tokenizer
from jcb.types import MAX_LOGPROBS, Logprobs, ScheduledRow, StepPlan, StepResult
from tests.fakes import HashExecutor

WORDS = ("brown", " fox", " f", "ox", "Alice")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token id == byte value below 256; then merged words; special tokens last, <|im_end|> ends an answer."""
    symbols = _byte_symbols()
    vocabulary = {symbol: byte for byte, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [symbols[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
            pieces[:2] = ["".join(pair)]
    pipeline = Pipeline(models.BPE(vocabulary, merges))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    end = pipeline.token_to_id("<|im_end|>")
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    bos = pipeline.token_to_id("<|im_start|>")
    size = pipeline.get_vocab_size(with_added_tokens=True)
    return Tokenizer(pipeline, config=config, bos_token_id=bos, eos_token_ids=(end,), vocab_size=size)


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class ScriptedExecutor(HashExecutor):
    """Answers a prompt with its script where there is one, else with letters drawn from prefix and seed.

    script: prompt ids → output ids. step_seconds: how long a step takes.
    Greedy letters depend on the prefix alone, so that they are the likeliest; sampled ones on the seed too.
    """

    def __init__(self, limits: Limits, *, max_num_seqs: int = 64) -> None:
        super().__init__(limits, max_num_seqs=max_num_seqs)
        self.script: dict[tuple[int, ...], list[int]] = {}
        self.step_seconds = 0.0
        self.wrong_token = self._token

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return super().dispatch(plan)

    def _token(self, row: ScheduledRow) -> int | None:
        request = row.sequence.request
        script = self.script.get(request.prompt_token_ids)
        if script is not None and row.num_output < len(script):
            return script[row.num_output]
        if row.mask is not None:
            ids = np.flatnonzero(np.unpackbits(row.mask.view(np.uint8), bitorder="little"))
            return int(ids[(hash((request.seed, row.num_output)) >> 3) % len(ids)])
        salt = 0 if request.params.is_greedy else request.seed
        first = sum(request.prompt_token_ids) + len(request.prompt_token_ids)
        allowed = request.params.allowed_token_ids
        draw = hash((first, row.num_output, salt)) >> 3
        return allowed[draw % len(allowed)] if allowed else 97 + draw % 26

    def _run(self, plan: StepPlan) -> StepResult:
        """The hash executor's result with log-probabilities that agree with the tokens."""
        result = super()._run(plan)
        for index, row in enumerate(plan.rows):
            if row.samples:
                entry = self._entry(int(result.token_ids[index]), MAX_LOGPROBS)
                result.top_ids[index] = entry.top_ids
                result.top_logprobs[index] = entry.top_logprobs
                result.logprobs[index] = np.float32(entry.logprob)
        return result

    def _score(self, row: ScheduledRow, cells: list[int]) -> list[Logprobs]:
        count = row.sequence.request.params.prompt_logprobs or 0
        return [self._entry(token, count) for token in [*row.token_ids[1:], row.next_token]]

    def _entry(self, token: int, count: int) -> Logprobs:
        tops = tuple((token + 7 * i) % self.limits.vocab_size for i in range(count))
        values = tuple(float(np.float32(-1.5 - 0.75 * i)) for i in range(max(count, 1)))
        return Logprobs(token, values[0], tops, values[:count])


def fake_engine(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    num_pages: int = 257,
    page_size: int = 4,
    max_model_len: int = 256,
    **scheduler: object,
) -> SimpleNamespace:
    """What `load_engine` returns, without a model."""
    tokenizer = byte_tokenizer()
    limits = Limits(
        page_size=page_size, num_pages=num_pages, max_model_len=max_model_len, vocab_size=tokenizer.vocab_size
    )
    config = ServeConfig(
        cache=CacheConfig(page_size=page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduler
        ),
    )
    executor = ScriptedExecutor(limits, max_num_seqs=max_num_seqs)
    core = EngineCore(Scheduler(config.scheduler, limits, enable_prefix_caching=True), executor)
    info = ModelInfo(
        name="fake",
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tokenizer.eos_token_ids,
        limits=limits,
    )
    template = ChatTemplate(CHATML, special_tokens={})
    metrics = EngineMetrics(max_num_seqs=max_num_seqs)
    return SimpleNamespace(
        core=core,
        tokenizer=tokenizer,
        chat_template=template,
        info=info,
        config=config,
        executor=executor,
        metrics=metrics,
    )
