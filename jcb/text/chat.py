"""Chat messages to a prompt: the model's template, and ids that a user's text cannot forge turns in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.text.frozen import freeze
from jcb.text.messages import check_plain, normalize_messages, normalize_tools
from jcb.text.template_engines import TemplateEngine, TemplateError, make_engine
from jcb.text.tokenizer import Tokenizer
from jcb.types import RequestError

ALLOWED_VARIABLES = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string", "documents"})
"""What a request may set in a template beside messages and tools (`chat_template_kwargs`)."""


class ChatTemplate:
    """A model's chat template.

    special_tokens: what templates print by name, such as {"bos_token": "<s>"} (`Tokenizer.named_tokens`).
    engine: another interpreter than the default one (tests). ModelLoadError when the source cannot be read.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], engine: TemplateEngine | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._engine = engine or make_engine(source)
        except TemplateError as error:
            raise ModelLoadError("chat_template", str(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **allowed: Any,
    ) -> str:
        """The prompt as text. RequestError (400) when messages, tools or variables do not fit the template."""
        check_variables(allowed)
        variables = {
            **self._special_tokens,
            **allowed,
            "messages": normalize_messages(messages),
            "tools": normalize_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._engine.render({name: freeze(value) for name, value in variables.items()})
        except TemplateError as error:
            raise RequestError(str(error), param="messages", code="chat_template_error") from error


def check_variables(variables: Mapping[str, Any]) -> None:
    """RequestError (400) for a variable that a request may not set, or that is not plain JSON."""
    for name in variables:
        if name not in ALLOWED_VARIABLES:
            known = ", ".join(sorted(ALLOWED_VARIABLES))
            raise RequestError(f"{printable(name)!r} is not one of {known}", param="chat_template_kwargs")
    check_plain(variables, "chat_template_kwargs")


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **allowed: Any,
) -> list[int]:
    """Ids of the rendered prompt, but strings of special tokens in messages, tools and variables stay text.

    continue_final_message: what the template puts behind the last message is left out.
    """
    mark = tokenizer.guard.mark_value
    marked = mark(normalize_messages(messages))
    text = template.render(
        marked,
        add_generation_prompt=add_generation_prompt,
        tools=mark(normalize_tools(tools)),
        **mark(allowed),
    )
    if continue_final_message:
        text = _up_to_the_end_of(marked[-1]["content"], text)
    return tokenizer.encode(text, add_special_tokens=False)


def _up_to_the_end_of(content: str, text: str) -> str:
    """`text` without what follows `content`, the last message as the template printed it."""
    for final in (content, content.strip()):
        start = text.rfind(final)
        if final and start >= 0:
            return text[: start + len(final)]
    raise RequestError(
        "the last message is empty, or the template does not print it as it is",
        param="continue_final_message",
        code="invalid_value",
    )


def load_chat_template(tokenizer: Tokenizer, source: str = "") -> ChatTemplate | None:
    """The template `source`, else the model's own; None when it has none."""
    source = source or tokenizer.chat_template or ""
    return ChatTemplate(source, special_tokens=tokenizer.named_tokens) if source else None
