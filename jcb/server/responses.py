"""POST /v1/responses: OpenAI's newer form of a text answer, without anything kept between requests."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.server.auth import TENANT
from jcb.server.params import response_params
from jcb.server.prompts import encode_messages
from jcb.server.reply import Event, reply
from jcb.server.responses_schema import ResponsesBody
from jcb.server.service import SERVICE
from jcb.server.usage import UsageCounter
from jcb.types import FinishReason, RequestError


async def responses(request: web.Request) -> web.StreamResponse:
    """Answers a text or a conversation."""
    service = request.app[SERVICE]
    served = service.require()
    body = await ResponsesBody.read(request, service, before=served.engine.check_room)
    params = response_params(body, served.defaults)
    try:
        ids = await encode_messages(served, body.messages(), body.template_options())
        stream = await served.engine.submit([ids], params, namespace=f"{request[TENANT]}/")
    except RequestError as error:
        raise body.in_its_words(error) from None
    return await reply(request, stream, ResponseShape(service.model_name, body, len(ids)), streams=body.stream)


class ResponseShape:
    """A `response` object, and the events that build one up."""

    names_events = True
    ends_with_done = False
    interval = 1

    def __init__(self, model: str, body: ResponsesBody, prompt_tokens: int) -> None:
        self.usage = UsageCounter([prompt_tokens], 1)
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._choice = Choice()
        self._number = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            **body.echoed(),
        }

    def adjust(self, output: RequestOutput) -> RequestOutput:
        return output

    def opening(self) -> list[Event]:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place, content_index=0, part=_text("")),
        ]

    def events(self, output: RequestOutput) -> list[Event]:
        self._choice.absorb(output)
        if not output.token_ids and not output.text:
            return []
        return [
            self._event("response.output_text.delta", **self._place, content_index=0, delta=output.text, logprobs=[])
        ]

    def closing(self) -> list[Event]:
        text = self._choice.text
        whole = self.whole([self._choice])
        return [
            self._event("response.output_text.done", **self._place, content_index=0, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, content_index=0, part=_text(text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failure(self, error: RequestError) -> Event:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        choice = choices[0]
        is_cut = choice.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        counts = self.usage.usage()
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(status, [_text(choice.text)])],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
