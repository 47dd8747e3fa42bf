"""What chat and plain completions share: chunks of choices under one head, and usage where it was asked for."""

from __future__ import annotations

import time
import uuid
from typing import Any

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput, RequestTimes
from jcb.server.errors import error_object
from jcb.server.reply import Event
from jcb.server.schema import GenerateBody, StreamOptions
from jcb.server.usage import UsageCounter
from jcb.types import RequestError


class ChunkShape:
    """A Shape for bodies of the form {id, object, created, model, choices, usage}.

    Endpoints give `choice` (a finished one), `chunks` (those of one output) and, if need be, `opening_chunks`
    and `extras`.
    """

    id_prefix = ""
    object = ""
    chunk_object = ""
    names_events = False
    ends_with_done = True

    def __init__(self, model: str, body: GenerateBody, usage: UsageCounter) -> None:
        self._model = model
        self._options = body.stream_options or StreamOptions()
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._times: RequestTimes | None = None
        self.interval = body.stream_interval
        self.usage = usage

    def adjust(self, output: RequestOutput) -> RequestOutput:
        return output

    def opening_chunks(self) -> list[dict[str, Any]]:
        """Fields of chunks before the first token."""
        return []

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Fields of the chunks of one output."""
        raise NotImplementedError

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def extras(self, choices: list[Choice]) -> dict[str, Any]:
        """Fields of the whole body beside the choices."""
        return {}

    def opening(self) -> list[Event]:
        return [self._event(fields) for fields in self.opening_chunks()]

    def events(self, output: RequestOutput) -> list[Event]:
        if self._times is None:
            self._times = output.times
        return [self._event(fields) for fields in self.chunks(output)]

    def closing(self) -> list[Event]:
        """The counts, on a chunk of their own; `metrics` is what vLLM's benchmark reads beside them."""
        if not self._options.include_usage:
            return []
        event = {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage.usage()}
        if self._times is not None:
            event["metrics"] = {
                "queue_time_ms": round(self._times.started * 1e3, 3),
                "time_to_first_token_ms": round(self._times.first_token * 1e3, 3),
            }
        return [event]

    def failure(self, error: RequestError) -> Event:
        return error_object(error)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.object,
            "choices": [self.choice(choice) for choice in choices],
            "usage": self.usage.usage(),
            **self.extras(choices),
        }

    def _event(self, fields: dict[str, Any]) -> Event:
        event = {**self._head, "object": self.chunk_object, **fields}
        if self._options.continuous_usage_stats:
            event["usage"] = self.usage.usage()
        elif self._options.include_usage:
            event["usage"] = None
        return event
