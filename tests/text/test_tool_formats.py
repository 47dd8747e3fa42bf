"""Which format a model speaks, and what a model without one is told."""

import pytest
from tokenizers import AddedToken

from jcb.text.chat import ChatTemplate, encode_chat
from jcb.text.detokenize import IncrementalDetokenizer
from jcb.text.tokenizer import Tokenizer
from jcb.text.tool_formats import HERMES, LLAMA, MISTRAL, SMOLLM, describe, tool_format, with_tools
from tests.fake_model import CHATML, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, SMOLLM),
        ("", SMOLLM),
        ('{% if tools %}... within <tool_call></tool_call> XML tags: "parameters" ...{% endif %}', HERMES),
        ('{%- if tools %}Respond in the format {"name": function name, "parameters": ...}', LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]...[TOOL_CALLS]{% endif %}", MISTRAL),
    ],
)
def test_the_template_tells(template, form):
    assert tool_format(template, byte_tokenizer()) == form


def test_marks_that_are_special_tokens_are_known_by_their_ids():
    plain = byte_tokenizer()
    plain.pipeline.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(plain.pipeline, config={}, eos_token_ids=plain.eos_token_ids)
    mark = tokenizer.special_tokens["[TOOL_CALLS]"]
    form = tool_format("{{ tools }} [TOOL_CALLS]", tokenizer)
    assert form.special == {"[TOOL_CALLS]": mark}
    assert form.parts(form.begin) == [mark]
    hidden = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, shown=(mark,))
    ids = [mark, ord("x"), *tokenizer.eos_token_ids]
    assert hidden.push(ids).text == "x"
    assert shown.push(ids).text == "[TOOL_CALLS]x"


def test_a_model_that_knows_no_tools_is_told_of_them():
    told = with_tools([{"role": "user", "content": "Hi"}], TOOLS)
    assert told == [{"role": "system", "content": describe(TOOLS)}, {"role": "user", "content": "Hi"}]
    assert '"name": "f"' in told[0]["content"]
    told = with_tools([{"role": "system", "content": "Be brief."}], TOOLS)
    assert told[0]["content"] == f"Be brief.\n\n{describe(TOOLS)}"


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_b109_earlier_calls_are_written_into_the_content(content):
    """B109: an assistant's message with calls and no content crashed the template."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    told = with_tools(turns, None)
    written = '<tool_call>[{"name": "f", "arguments": {"a": "é"}}]</tool_call>'
    assert told[1]["content"] == (f"{content}\n{written}" if content else written)
    assert turns[1]["tool_calls"] == CALLS, "the caller's messages are not changed"
    tokenizer = byte_tokenizer()
    ids = encode_chat(tokenizer, ChatTemplate(CHATML, special_tokens={}), told)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert f"{written}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n" in text
