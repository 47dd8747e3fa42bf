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
        for name in allowed:
            if name not in ALLOWED_VARIABLES:
                known = ", ".join(sorted(ALLOWED_VARIABLES))
                raise RequestError(f"{printable(name)!r} is not one of {known}", param="chat_template_kwargs")
        check_plain(allowed, "chat_template_kwargs")
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


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **allowed: Any,
) -> list[int]:
    """Ids of the rendered prompt, but strings of special tokens in messages, tools and variables stay text."""
    mark = tokenizer.guard.mark_value
    text = template.render(
        mark(normalize_messages(messages)),
        add_generation_prompt=add_generation_prompt,
        tools=mark(normalize_tools(tools)),
        **mark(allowed),
    )
    return tokenizer.encode(text, add_special_tokens=False)


def load_chat_template(tokenizer: Tokenizer, source: str = "") -> ChatTemplate | None:
    """The template `source`, else the model's own; None when it has none."""
    source = source or tokenizer.chat_template or ""
    return ChatTemplate(source, special_tokens=tokenizer.named_tokens) if source else None
