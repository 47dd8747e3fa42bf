"""An answer that must be tool calls is one, in every family's format, and its arguments follow their schemas."""

import json
import random

import jsonschema
import pytest

from jcb.structured.compiler import GrammarCompiler
from jcb.structured.tools import tool_grammar
from jcb.text.tool_formats import HERMES, LLAMA, MISTRAL, SMOLLM
from jcb.text.tool_parser import ToolCallParser
from jcb.types import RequestError, Structured
from tests.structured.test_grammar import VOCAB, compiled, draw

FUNCTIONS = [
    {"name": "get_weather", "parameters": {"$ref": "#/$defs/where", "$defs": {"where": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
        "required": ["city"], "additionalProperties": False}}}},
    {"name": 'say-"hi"', "parameters": {"properties": {"n": {"enum": [1, 2]}}, "additionalProperties": False}},
    {"name": "now"},
]  # fmt: skip
FORMS = [HERMES, SMOLLM, MISTRAL, LLAMA]


def calls_of(form, text):
    parser = ToolCallParser(form, {function["name"] for function in FUNCTIONS})
    calls = []
    for parsed in (parser.push(text), parser.finish()):
        assert parsed.content == ""
        for delta in parsed.calls:
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return calls


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_follow_their_schemas(form, parallel):
    functions = FUNCTIONS[:2]
    structured = tool_grammar(form, functions, parallel=parallel)
    grammar, rng = compiled("grammar", structured.source), random.Random(1)
    schemas = {function["name"]: function["parameters"] for function in functions}
    counts, names = set(), set()
    for _ in range(12):
        calls = calls_of(form, draw(grammar, rng))
        counts.add(len(calls))
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(json.loads(arguments), {"type": "object"} | schemas[name])
    assert counts == {1} if not parallel else max(counts) > 1
    assert names == set(schemas)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_function_without_parameters_takes_any_object(form):
    structured = tool_grammar(form, FUNCTIONS[2:], parallel=False)
    matcher = compiled("grammar", structured.source).start(frozenset())
    text = form.begin + ("[" if form.is_list else "") + f'{{"name": "now", "{form.arguments}": {{}}}}'
    for byte in (text + ("]" if form.is_list else "") + form.end).encode():
        matcher.advance(byte, frozenset())
        assert matcher.error is None
    assert matcher.accepts


def test_an_answer_of_a_schema_instead_of_calls():
    answer = Structured(kind="json", source='{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
                        '"required": ["ok"], "additionalProperties": false}')  # fmt: skip
    grammar = compiled("grammar", tool_grammar(HERMES, FUNCTIONS[1:2], parallel=False, answer=answer).source)
    rng, kinds = random.Random(0), set()
    for _ in range(20):
        text = draw(grammar, rng)
        kinds.add(text[0])
        if text[0] == "{":
            assert json.loads(text)["ok"] in (True, False)
        else:
            assert calls_of(HERMES, text)[0][0] == 'say-"hi"'
    assert kinds == {"{", "<"}


def test_as_many_tools_as_a_request_may_have():
    """128 of them in 256 KB: the grammar made of all is larger still, and tried out before it is used."""
    parameters = {"properties": {f"field_{i}": {"type": "string", "description": "x" * 130} for i in range(9)}}
    functions = [{"name": f"tool_{i}", "parameters": parameters} for i in range(128)]
    assert 200_000 < len(json.dumps(functions)) < 262_144
    structured = tool_grammar(HERMES, functions, parallel=True)
    compiler = GrammarCompiler(VOCAB)
    try:
        compiler.submit(structured).result(timeout=60)
        with pytest.raises(RequestError, match="at most 524,288"):
            compiler.submit(tool_grammar(HERMES, functions * 3, parallel=True)).result(timeout=60)
    finally:
        compiler.close()
