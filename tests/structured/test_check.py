"""What is refused before anything is compiled."""

import json

import pytest

from jcb.structured.check import check
from jcb.structured.regex_size import MOST, expanded_size
from jcb.types import RequestError, Structured


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"a\.[b-d]", 3),
        ("a{3}", 3),
        ("ab{2,5}c", 7),
        ("(ab){3}", 6),
        ("((a{2}b){3}c){4}", 40),
        (r"\p{L}{7}", 7),
        ("[{]{2}", 2),
        (r"\{2}", 3),
        ("(?:ab){2}", 4),
        ("(?i:ab){2}", 4),
        ("a{2,}", 2),
        ("{5}", 1),
        (")a{3}", 4),
        ("(a{3}", 3),
        ("a{1" + "0" * 5_000 + "}", MOST),
        ("(" * 600 + "a" + "{999999999})" * 600, MOST),
    ],
)
def test_expanded_size(pattern, size):
    assert expanded_size(pattern) == size


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json", "{", "not valid JSON"),
        ("json", "[" * 100_000, "characters"),
        ("json", "[" * 60_000, "not valid JSON"),
        ("json", "[]", "must be a JSON schema"),
        ("json", "5", "must be a JSON schema"),
        ("json", " ", "is empty"),
        ("json", json.dumps(nested(64)), "deeper than 64"),
        ("json", json.dumps({"enum": [[]] * 2000}), "objects and lists"),
        ("json", json.dumps({"description": "x" * 65_536}), "characters"),
        ("regex", "a" * 2049, "2,049 characters, at most 2,048"),
        ("regex", "", "is empty"),
        ("regex", "\ud800", "surrogate"),
        ("grammar", "a" * 65_537, "characters"),
        ("choice", "[]", "1 to 1,000"),
        ("choice", json.dumps(["a"] * 1001), "1 to 1,000"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", '["a", 1]', "strings"),
        ("grammar", "start: /a{100001}/", "long with its repetitions"),
        ("choice", json.dumps(["a" * 4097]), "4,096"),
        ("json", json.dumps({"const": "a" * 4097}), "4,097 characters"),
        ("json", json.dumps({"enum": ["a" * 4097]}), "4,097 characters"),
        ("json", json.dumps({"items": {"pattern": "a{10001}"}}), "10,001 long"),
        ("json", json.dumps({"patternProperties": {"a{10001}": {}}}), "10,001 long"),
        ("json", json.dumps({"patternProperties": {"a{1" + "0" * 5_000 + "}": {}}}), "1,000,000,000 long"),
        ("grammar", "start: /" + "(" * 600 + "a" + "{999999999})" * 600 + "/", "1,000,000,000 long"),
        ("regex", "[a-z]{20}((a{100}){100}){100}", "1,000,020 long"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_refused(kind, source, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        check(Structured(kind=kind, source=source, param="the.field"))
    assert (caught.value.status, caught.value.param) == (400, "the.field")
    assert caught.value.message.startswith("the.field ")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", "true"),
        ("json", json.dumps(nested(63))),
        ("json", json.dumps({"enum": [[]] * 1998})),
        ("regex", "é" * 2048),
        ("regex", "(a{100}){100}"),
        ("json", json.dumps({"description": "x" * 60_000})),
        ("choice", json.dumps([str(i) for i in range(1000)])),
        ("grammar", "start: x"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_accepted(kind, source):
    check(Structured(kind=kind, source=source))
