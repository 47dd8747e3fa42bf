"""Tool calls found in answers, however the answers are cut into pieces."""

import random
import time

import pytest

from jcb.text.tool_formats import HERMES, LLAMA, MISTRAL, SMOLLM
from jcb.text.tool_parser import ToolCallParser

NAMES = ("f", "g")
F1 = {0: ("f", '{"a": [1, "}{\\""], "b": {}}')}


def parse(form, pieces):
    parser, content, calls = ToolCallParser(form, NAMES), "", {}
    for piece in [*pieces, None]:
        parsed = parser.finish() if piece is None else parser.push(piece)
        content += parsed.content
        for delta in parsed.calls:
            assert delta.name is None or delta.index == len(calls), "a name comes once, in the order of calls"
            name, arguments = (delta.name, "") if delta.name is not None else calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    return content, calls


CASES = [
    (HERMES, 'Sure.\n<tool_call>\n{"name": "f", "arguments": ' + F1[0][1] + "}\n</tool_call>", "Sure.\n", F1),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"x": 1}}'
        "\n</tool_call>",
        "",
        {0: ("f", "{}"), 1: ("g", '{"x": 1}')},
    ),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "other"}</tool_call> bye', "bye", {0: ("other", '{"x": 1}')}),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", {0: ("f", "{}")}),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", {0: ("f", '{"a": 1}')}),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": ', "", {0: ("f", '{"a": ')}),  # cut by max_tokens
    (HERMES, "a < b <tool_cal <tool_call>oops</tool_call>", "a < b <tool_cal <tool_call>oops</tool_call>", {}),
    (HERMES, '<tool_call>\n{"foo": 1}\n</tool_call>', '<tool_call>\n{"foo": 1}\n</tool_call>', {}),
    (HERMES, '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', {}),
    (HERMES, "plain <", "plain <", {}),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', {}),
    (
        SMOLLM,
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "]"}}]</tool_call>',
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", '{"b": "]"}')},
    ),
    (SMOLLM, "<tool_call>[]</tool_call>", "", {}),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", {0: ("f", '{"a": 1}')}),
    (
        LLAMA,
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": null}}',
        "",
        {0: ("f", "{}"), 1: ("g", '{"a": null}')},
    ),
    (LLAMA, '{"name": "unknown", "parameters": {}} !', '{"name": "unknown", "parameters": {}} !', {}),
    (LLAMA, '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', {}),
    (LLAMA, 'Hello {"name": "f"}', 'Hello {"name": "f"}', {}),
    (LLAMA, "", "", {}),
]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), CASES, ids=[f"{c[0].name}-{i}" for i, c in enumerate(CASES)]
)
def test_calls_and_content(form, text, content, calls):
    assert parse(form, [text]) == (content, calls)
    assert parse(form, list(text)) == (content, calls)
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, pieces) == (content, calls)


def test_arguments_are_given_as_they_come():
    parser = ToolCallParser(HERMES, NAMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    assert [d.arguments for d in parser.push("long te").calls] == ["long te"]
    assert [d.arguments for d in parser.push('xt"').calls] == ['xt"']


@pytest.mark.parametrize("form", [HERMES, SMOLLM, MISTRAL, LLAMA], ids=lambda f: f.name)
@pytest.mark.parametrize("unit", ["[", "{", '{"name": ', "<tool_call>", "<", '"', "\\", '{"a":', "[TOOL_CALLS]["])
def test_b137_time_grows_with_the_length_and_nothing_more(form, unit):
    """B137: a regex in a tool parser blew up; here every character is looked at a bounded number of times."""

    def seconds(length):
        text = unit * (length // len(unit))
        begin = time.process_time()
        content, calls = parse(form, [text[i : i + 7] for i in range(0, len(text), 7)])
        assert calls == {}
        assert content == text
        return time.process_time() - begin

    short, long = min(seconds(2_000) for _ in range(3)), min(seconds(20_000) for _ in range(2))
    assert long < 30 * short + 0.05
