"""Grammars over a vocabulary of bytes: whatever is drawn from the masks is an answer, and ends."""

import json
import random

import numpy as np
import pytest

from jcb.structured.grammar import CompiledGrammar, GrammarError, translate, try_out
from jcb.structured.vocab import make_tokenizer, vocab_of
from jcb.types import Structured
from tests.fake_model import byte_tokenizer
from tests.structured.generators import fits_regex, fits_schema, random_regex, random_schema

pytest.importorskip("llguidance")

TOKENIZER = byte_tokenizer()
VOCAB = vocab_of(TOKENIZER, TOKENIZER.vocab_size + 3)  # a model may have more ids than its tokenizer
LL = make_tokenizer(VOCAB)
NONE = frozenset()


def compiled(kind: str, source: str) -> CompiledGrammar:
    structured = Structured(kind=kind, source=source)
    return CompiledGrammar(LL, VOCAB, translate(structured), structured.param)


def allowed(matcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()


def draw(grammar: CompiledGrammar, rng: random.Random, most: int = 4000) -> str:
    """A random answer; an end id is taken where the grammar allows one and a coin says so."""
    matcher, ids = grammar.start(NONE), []
    while not matcher.is_complete:
        assert matcher.error is None
        assert len(ids) < most
        token = rng.choice(allowed(matcher))
        if token in grammar.end_ids:
            assert matcher.accepts
            break
        ids.append(token)
        matcher.advance(token, NONE)
    return TOKENIZER.decode(ids, continuation=True)


@pytest.mark.parametrize("seed", range(40))
def test_random_schemas(seed):
    rng = random.Random(seed)
    schema = random_schema(rng)
    grammar = compiled("json", json.dumps(schema))
    for _ in range(5):
        fits_schema(draw(grammar, rng), schema)


@pytest.mark.parametrize("seed", range(40))
def test_random_regexes(seed):
    rng = random.Random(seed)
    pattern = random_regex(rng) + "!"  # the empty answer alone is refused
    grammar = compiled("regex", pattern)
    for _ in range(5):
        fits_regex(draw(grammar, rng), pattern)


def test_choices_are_taken_as_they_are():
    choices = ["yes", "no", "yes!", 'é "q"\n\\', "<|im_end|>", "[a-z]"]
    grammar, rng = compiled("choice", json.dumps(choices)), random.Random(0)
    assert {draw(grammar, rng) for _ in range(200)} == set(choices)


@pytest.mark.parametrize("source", ['start: "a" digits\ndigits: /[0-9]{2}/', 'root ::= "a" [0-9] [0-9]'])
def test_lark_and_gbnf(source):
    grammar, rng = compiled("grammar", source), random.Random(0)
    for _ in range(5):
        fits_regex(draw(grammar, rng), "a[0-9]{2}")


def test_special_tokens_and_ids_without_text_are_never_allowed_in_text():
    matcher = compiled("regex", r"(?s:.)*").start(NONE)
    special = set(TOKENIZER.special_tokens.values()) - set(TOKENIZER.eos_token_ids)
    beyond = set(range(TOKENIZER.vocab_size, VOCAB.size))
    assert not (special | beyond) & set(allowed(matcher))
    assert set(TOKENIZER.eos_token_ids) <= set(allowed(matcher))


def test_the_end_is_allowed_only_where_the_grammar_accepts():
    matcher = compiled("regex", "ab?c*").start(NONE)
    ends = set(TOKENIZER.eos_token_ids)
    assert not matcher.accepts
    assert not ends & set(allowed(matcher))
    matcher.advance(ord("a"), NONE)
    assert matcher.accepts
    assert not matcher.is_complete
    assert ends <= set(allowed(matcher))
    matcher.advance(ord("b"), NONE)
    assert matcher.accepts


def test_complete_without_an_end_token():
    matcher = compiled("json", '{"type": "boolean"}').start(NONE)
    for byte in b"true":
        assert not matcher.is_complete
        matcher.advance(byte, NONE)
    assert matcher.is_complete
    assert matcher.accepts


def test_ids_are_held_back_unless_nothing_else_is_left():
    grammar = compiled("regex", "[ab]c")
    assert allowed(grammar.start(frozenset({ord("a")}))) == [ord("b")]
    matcher = grammar.start(NONE)
    matcher.advance(ord("a"), frozenset({ord("c")}))
    assert allowed(matcher) == [ord("c")]
    assert allowed(grammar.start(NONE)) == [ord("a"), ord("b")]  # the shared beginning is untouched


def test_answers_of_one_grammar_do_not_know_of_each_other():
    grammar = compiled("regex", "a{3}|b{3}")
    first, second = grammar.start(NONE), grammar.start(NONE)
    first.advance(ord("a"), NONE)
    second.advance(ord("b"), NONE)
    assert (allowed(first), allowed(second)) == ([ord("a")], [ord("b")])


def test_a_wrong_token_is_an_error_and_not_a_crash():
    matcher = compiled("regex", "ab").start(NONE)
    matcher.advance(ord("x"), NONE)
    assert matcher.error is not None
    assert matcher.error.status == 400
    assert not matcher.is_complete


@pytest.mark.parametrize("pattern", ["^(.*)$", "^(|.*)$", "^a|b$"])
def test_b129_anchors(pattern):
    """B129: the first request fixed a back end, and a pattern for another one crashed it."""
    grammar, rng = compiled("regex", pattern), random.Random(0)
    for _ in range(3):
        fits_regex(draw(grammar, rng), pattern)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(|)", "empty"),
        ("json", '{"type": ["x"]}', "Invalid type: x"),
        ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json", '{"not": {}}', '"not"'),
        ("json", '{"x-guidance": {"lenient": true}, "not": {}}', '"not"'),
        ("json", '{"$ref": "#"}', "no token fits"),
        ("json", '{"$ref": "http://127.0.0.1:1/x"}', "not present"),
        ("json", '{"$ref": "file:///etc/passwd"}', "not present"),
        ("json", "false", "schema false"),
        ("json", '{"enum": []}', "empty"),
        ("grammar", "start: nope", "nope"),
        ("grammar", "root ::= (((", "cannot be read"),
    ],
)
def test_b137_what_cannot_be_used_is_refused_with_the_reason(kind, source, reason):
    """B137: a malformed pattern or type in a schema killed the worker."""
    with pytest.raises(GrammarError, match=reason):
        compiled(kind, source)


def test_a_trial_refuses_what_fails_on_its_way_or_is_slow(monkeypatch):
    try_out(compiled("json", '{"type": "object"}'))
    with pytest.raises(GrammarError, match="too many expressions"):
        try_out(compiled("regex", "(?:a?){1000}a{1000}"))
    monkeypatch.setattr("jcb.structured.grammar.MAX_TOKEN_SECONDS", 0.0)
    with pytest.raises(GrammarError, match="ms"):
        try_out(compiled("json", '{"type": "object"}'))


def test_an_answer_that_turns_slow_ends_with_an_error(monkeypatch):
    grammar = compiled("regex", "[ab]{99}")
    monkeypatch.setattr("jcb.structured.grammar.MAX_TOKEN_SECONDS", -0.08)
    matcher, count = grammar.start(NONE), 0
    while matcher.error is None:
        matcher.advance(ord("a"), NONE)
        count += 1
    assert count == 4
    assert matcher.error.code == "grammar_failed"
    assert grammar.start(NONE).error is None


def test_blanks_are_bounded():
    matcher = compiled("json", '{"type": "object"}').start(NONE)
    matcher.advance(ord("{"), NONE)
    matcher.advance(ord("\n"), NONE)
    count = 0
    while ord(" ") in allowed(matcher):
        matcher.advance(ord(" "), NONE)
        count += 1
    assert count == 32


def test_a_tokenizer_of_an_unknown_kind_has_no_vocabulary(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "eos_token_ids", ())
    assert vocab_of(TOKENIZER, 10) is None
