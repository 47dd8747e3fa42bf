"""The body of POST /v1/responses: the text subset of OpenAI's, without state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from jcb.server.schema import Body, Message, TemplateOptions, TextContent, span
from jcb.server.structured import TextOption
from jcb.types import RequestError

_NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
"""What the fields that it is turned into are called here."""


class InputMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextContent

    def as_message(self) -> Message:
        """The same turn as chat completions have it; `id` and `status` of an earlier answer say nothing."""
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in ("id", "status", "phase")}
        return Message(role=self.role, content=self.content, **extra)


class ResponsesBody(Body):
    """POST /v1/responses."""

    input: str | Annotated[list[InputMessage], FailFast()]
    instructions: str | None = None
    max_output_tokens: Annotated[int, span(1, 2**31 - 1)] | None = None
    temperature: Annotated[float, span(0, 10)] = 1.0
    top_p: Annotated[float, span(0, 1, low_open=True)] = 1.0
    stream: bool = False
    text: TextOption | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    narrow: ClassVar[Mapping[str, Mapping[str, Any]]] = {"metadata": {"status": "label"}}

    def messages(self) -> list[Message]:
        """The conversation as chat completions have it."""
        turns = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            return [*turns, Message(role="user", content=self.input)]
        return [*turns, *[item.as_message() for item in self.input]]

    def in_its_words(self, error: RequestError) -> RequestError:
        """An error of `messages` as one of the field that they were made of."""
        found = re.fullmatch(r"(\w+)(?:\[(\d+)\])?(.*)", error.param or "", re.DOTALL)
        name = None if found is None else _NAMES.get(found[1])
        if found is None or name is None:
            return error
        param = name
        if found[2] is not None and not isinstance(self.input, str):
            index = int(found[2]) - (self.instructions is not None)
            param = "instructions" if index < 0 else f"{name}[{index}]{found[3]}"
        message = error.message.replace(error.param or "", param) if found[1] == "messages" else error.message
        return RequestError(
            message, status=error.status, param=param, code=error.code or "invalid_value", retry_after=error.retry_after
        )

    def template_options(self) -> TemplateOptions:
        """How the conversation becomes a prompt: as it always does."""
        return TemplateOptions()

    def echoed(self) -> dict[str, Any]:
        """Fields of the answer that repeat the request or say what could not be asked for."""
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}, **{k: v for k, v in (self.text or {}).items() if v is not None}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.top_p,
            "truncation": "disabled",
        }
