"""The default model at temperature 1 under random schemas and regexes: every answer that ends is valid."""

import json
import random
from functools import cache

import pytest

from jcb.structured.compiler import GrammarCompiler
from jcb.structured.vocab import vocab_of
from jcb.text.tokenizer import load_tokenizer
from jcb.types import FinishReason, Request, SamplingParams, Structured
from tests.e2e.real_model import EOS, Engine, checkpoint, executor
from tests.structured.generators import fits_regex, fits_schema, random_bounded_regex, random_object_schema

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.golden, pytest.mark.timeout(1500)]

MAX_TOKENS = 700
COUNTS = [pytest.param(6, id="6"), pytest.param(100, id="100", marks=pytest.mark.slow)]


@cache
def tokenizer():
    return load_tokenizer(checkpoint())


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocab_of(tokenizer(), checkpoint().config.vocab_size))


def guided(name: str, structured: Structured) -> Request:
    prompt = tokenizer().encode(f"<|im_start|>user\nWrite {structured.kind}.<|im_end|>\n<|im_start|>assistant\n")
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, structured=structured),
        eos_token_ids=(EOS,),
        seed=sum(map(ord, name)),
        max_tokens=MAX_TOKENS,
        grammar=compiler().compile_here(structured),
    )


def texts(requests: list[Request], **engine) -> dict[str, str]:
    answers = Engine(executor(), **engine).run(requests)
    assert {answer.finish_reason for answer in answers.values()} == {FinishReason.STOP}
    return {name: tokenizer().decode(answer.token_ids, continuation=True) for name, answer in answers.items()}


@pytest.mark.parametrize("count", COUNTS)
def test_random_schemas(count):
    rng = random.Random(11)
    schemas = {f"schema {i}": random_object_schema(rng) for i in range(count)}
    requests = [guided(name, Structured(kind="json", source=json.dumps(schema))) for name, schema in schemas.items()]
    for name, text in texts(requests).items():
        fits_schema(text, schemas[name])


@pytest.mark.parametrize("count", COUNTS)
def test_random_regexes(count):
    rng = random.Random(12)
    patterns = {f"regex {i}": random_bounded_regex(rng) + "!" for i in range(count)}
    requests = [guided(name, Structured(kind="regex", source=pattern)) for name, pattern in patterns.items()]
    for name, text in texts(requests).items():
        fits_regex(text, patterns[name])


def test_the_answer_is_the_same_after_preemptions_and_without_overlap():
    requests = [guided(f"r{i}", Structured(kind="regex", source=f"[A-Z]{{8}}-[0-9]{{{i + 2}}}")) for i in range(3)]
    alone = texts(requests)
    assert texts(requests, overlap=False) == alone
    assert texts(requests, preempt_every=5) == alone
