import pytest

from jcb.text.messages import MAX_MESSAGES, normalize_messages, normalize_tools
from jcb.types import RequestError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_b109_an_assistant_message_without_content_becomes_empty_text(message):
    (normalized,) = normalize_messages([{"role": "assistant", "tool_calls": [CALL], **message}])
    assert normalized["content"] == ""
    assert normalized["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_b111_empty_assistant_content_is_kept():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]
    assert normalize_messages(messages) == messages


def test_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"]
    assert normalize_messages([{"role": "user", "content": parts}])[0]["content"] == "a\n\nb"


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert normalize_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


def test_the_caller_keeps_his_own_messages():
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    normalize_messages(messages)[0]["tool_calls"][0]["function"]["name"] = "changed"
    assert messages[0]["content"] is None
    assert CALL["function"]["name"] == "f"
    assert CALL["function"]["arguments"] == '{"x": 1}'


def deep(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return value


BAD = {
    "no list": "hi",
    "empty": [],
    "a text for a message": ["hi"],
    "no role": [{"content": "a"}],
    "role a number": [{"role": 1, "content": "a"}],
    "empty role": [{"role": "", "content": "a"}],
    "content a number": [{"role": "user", "content": 5}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
    "a part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a number as part": [{"role": "user", "content": [5]}],
    "calls no list": [{"role": "assistant", "tool_calls": "f"}],
    "a call no object": [{"role": "assistant", "tool_calls": ["f"]}],
    "a lone surrogate": [{"role": "user", "content": "\ud800"}],
    "an object of Python": [{"role": "user", "content": "a", "name": object()}],
    "too deep": [{"role": "user", "content": "a", "name": deep(100_000)}],
    "too many": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_naming_the_field(name):
    with pytest.raises(RequestError) as caught:
        normalize_messages(BAD[name])
    assert caught.value.status == 400
    assert caught.value.param.startswith("messages")


def test_tools():
    assert normalize_tools(None) is normalize_tools([]) is None
    assert normalize_tools([{"type": "function"}]) == [{"type": "function"}]
    for bad in ({"a": 1}, ["f"], [{"a": object()}]):
        with pytest.raises(RequestError, match="tools"):
            normalize_tools(bad)
