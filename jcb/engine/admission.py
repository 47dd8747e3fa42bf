"""What a caller asks for, checked once and turned into engine requests.

Everything behind this module may trust its numbers: finite, in range, token ids inside the vocabulary.
A RequestError names the field at fault.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from jcb.config import Limits
from jcb.types import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    Request,
    RequestError,
    SamplingParams,
)

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the front needs to know of the model served."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    limits: Limits | None = None


def make_requests(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    model: ModelInfo,
    request_id: str,
    rng: random.Random,
    priority: int = 0,
    namespace: str = "",
    arrival_time: float = 0.0,
    grammar: Grammar | None = None,
) -> list[Request]:
    """One engine request a choice, all with the same prompt; choice i draws with seed f(seed, i).

    grammar: `params.structured`, compiled.
    `request_id` must be unique in the engine; the choices are `request_id-0` … `request_id-(n-1)`.
    An explicit max_tokens that does not fit behind the prompt is refused, None takes what is left.
    """
    assert params.structured is None or grammar is not None, "compile it first"
    params = validate(params, model)
    prompt = check_prompt(prompt_token_ids, model)
    check_int("priority", priority, -_INT32 - 1, _INT32)
    max_tokens = _resolve_max_tokens(len(prompt), params, model)
    seed = rng.getrandbits(64) if params.seed is None else params.seed
    return [
        Request(
            request_id=f"{request_id}-{i}",
            prompt_token_ids=prompt,
            params=params,
            arrival_time=arrival_time,
            priority=priority,
            namespace=namespace,
            eos_token_ids=() if params.ignore_eos else model.eos_token_ids,
            seed=choice_seed(seed, i),
            max_tokens=max_tokens,
            grammar=grammar,
        )
        for i in range(params.n)
    ]


def choice_seed(seed: int, index: int) -> int:
    """64 bits that depend on both: choices of one request differ, and come again with the same seed."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def validate(params: SamplingParams, model: ModelInfo) -> SamplingParams:
    """`params` with neutral values in their one form (top_k above the vocabulary is off), or RequestError."""
    vocab_size = model.vocab_size
    check_int("n", params.n, 1, MAX_N)
    if params.max_tokens is not None:
        check_int("max_tokens", params.max_tokens, 1, _INT32)
    check_int("min_tokens", params.min_tokens, 0, _INT32)
    check_float("temperature", params.temperature, 0.0, 10.0)
    check_int("top_k", params.top_k, -1, None)
    check_float("top_p", params.top_p, 0.0, 1.0, low_open=True)
    check_float("min_p", params.min_p, 0.0, 1.0)
    check_float("presence_penalty", params.presence_penalty, -2.0, 2.0)
    check_float("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_float("repetition_penalty", params.repetition_penalty, 0.0, 10.0, low_open=True)
    if params.seed is not None:
        check_int("seed", params.seed, -_INT64 - 1, _INT64)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            check_int(name, getattr(params, name), 0, MAX_LOGPROBS)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise _invalid(name, "must be true or false")
    _check_stop(params.stop)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    _check_logit_bias(params, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size, least=1)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
        if params.min_tokens and ends.issuperset(params.allowed_token_ids):
            raise _invalid("allowed_token_ids", "must hold an id that does not end the answer where min_tokens is set")
    if params.structured is not None and params.allowed_token_ids is not None:
        raise _invalid("allowed_token_ids", f"cannot be used together with {params.structured.param}")
    _check_bad_words(params)
    return dataclasses.replace(
        params,
        top_k=0 if params.top_k == -1 or params.top_k >= vocab_size else params.top_k,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        bad_words=tuple(params.bad_words),
    )


def check_prompt(token_ids: Sequence[int], model: ModelInfo) -> tuple[int, ...]:
    """The prompt as a tuple; RequestError unless it is 1 … max_model_len - 1 ids of the vocabulary."""
    prompt = tuple(token_ids)
    if not prompt:
        raise _invalid("prompt", "is empty: at least one token is needed")
    if not all(type(token) is int for token in prompt):
        raise _invalid("prompt", "must hold whole numbers as token ids")
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        bad = next(t for t in prompt if not 0 <= t < model.vocab_size)
        raise _invalid("prompt", f"token id {_short(bad)} is outside the vocabulary [0, {model.vocab_size})")
    if len(prompt) >= model.max_model_len:
        raise context_too_long(len(prompt), None, model)
    return prompt


def context_too_long(prompt_len: int, max_tokens: int | None, model: ModelInfo) -> RequestError:
    """The refusal that states prompt length, requested completion and limit."""
    asked = "room for at least 1 more" if max_tokens is None else f"{max_tokens} for the completion"
    needed = prompt_len + (1 if max_tokens is None else max_tokens)
    return RequestError(
        f"This model's maximum context length is {model.max_model_len} tokens, but {needed} were requested: "
        f"{prompt_len} in the prompt and {asked}. Shorten the prompt or the completion.",
        param="prompt" if max_tokens is None else "max_tokens",
        code="context_length_exceeded",
    )


def check_int(name: str, value: object, low: int, high: int | None) -> int:
    """`value` if it is a whole number (bool is none) in [low, high], else RequestError."""
    if type(value) is not int:
        raise _invalid(name, f"must be a whole number, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        top = "" if high is None else f" and at most {high}"
        raise _invalid(name, f"must be at least {low}{top}, got {_short(value)}")
    return value


def check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """`value` if it is a finite number in [low, high] ((low, high] with `low_open`), else RequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(name, f"must be a number, got {type(value).__name__}")
    inside = low < value <= high if low_open else low <= value <= high
    if not inside or (isinstance(value, float) and not math.isfinite(value)):
        bracket = "(" if low_open else "["
        raise _invalid(name, f"must be in {bracket}{low:g}, {high:g}], got {_short(value)}")
    return float(value)


def _resolve_max_tokens(prompt_len: int, params: SamplingParams, model: ModelInfo) -> int:
    room = model.max_model_len - prompt_len
    if params.max_tokens is not None and params.max_tokens > room:
        raise context_too_long(prompt_len, params.max_tokens, model)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.min_tokens > max_tokens:
        raise _invalid("min_tokens", f"must be at most max_tokens={max_tokens}, got {params.min_tokens}")
    return max_tokens


def _check_stop(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise _invalid("stop", "must be a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"may hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise _invalid("stop", "must hold strings that are not empty")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise _invalid("stop", f"strings may have at most {MAX_STOP_STRING_CHARS} characters, got {len(text)}")


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_words
    if not isinstance(words, Sequence) or isinstance(words, str) or len(words) > MAX_BAD_WORDS:
        raise _invalid("bad_words", f"must be a list of at most {MAX_BAD_WORDS} strings")
    for word in params.bad_words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_STOP_STRING_CHARS:
            raise _invalid("bad_words", f"must hold strings of 1 to {MAX_STOP_STRING_CHARS} characters")
    if params.bad_words and params.allowed_token_ids is not None:
        raise _invalid("allowed_token_ids", "cannot be used together with bad_words")


def _check_ids(name: str, ids: Sequence[int], vocab_size: int, most: int, *, least: int = 0) -> None:
    if not least <= len(ids) <= most:
        raise _invalid(name, f"must hold {least} to {most} token ids, got {len(ids)}")
    for token in ids:
        check_int(name, token, 0, vocab_size - 1)


def _check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise _invalid("logit_bias", f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(params.logit_bias)}")
    for token, bias in params.logit_bias.items():
        check_int("logit_bias", token, 0, vocab_size - 1)
        check_float("logit_bias", bias, -100.0, 100.0)


def _invalid(name: str, problem: str) -> RequestError:
    return RequestError(f"{name} {problem}", param=name, code="invalid_value")


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"a number of about {'-' if value < 0 else ''}2^{value.bit_length() - 1}"
    return repr(value)[:64]
