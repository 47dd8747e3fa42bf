"""One streamed request to a server that speaks OpenAI's API, and when its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: dict[str, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_MAX_ERROR = 300


@dataclass
class Outcome:
    """How one request went. Times in seconds; start on the clock of `time.perf_counter`.

    itls: gaps between the events that brought text. latency: from start to the last of them. queued: what it waited
    in this client for --max-concurrency. error: why it failed, "" when it did not. prompt_tokens, output_tokens: the
    server's usage where it sends one, else the length asked for and the number of events.
    """

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    queued: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    text: str = ""
    error: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error


def make_body(backend: Backend, model: str, prompt: str, max_tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request's JSON. fields: more of it, which win."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai":
        return body | {"prompt": prompt, "max_tokens": max_tokens} | dict(fields)
    content = [{"type": "text", "text": prompt}]
    messages = [{"role": "user", "content": content}]
    return body | {"messages": messages, "max_completion_tokens": max_tokens} | dict(fields)


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    prompt_tokens: int,
    headers: Mapping[str, str] | None = None,
) -> Outcome:
    """POST `body` and read the stream to its end; failures are named in the outcome, nothing is raised."""
    outcome = Outcome(start=time.perf_counter(), prompt_tokens=prompt_tokens)
    try:
        async with session.post(url, json=body, headers=headers) as response:
            if response.status == 200:
                await _read(response, outcome)
            else:
                outcome.error = f"status {response.status}: {_message(await response.text())}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Take the stream's events in."""
    last, is_done = 0.0, False
    async for data in _events(response):
        now = time.perf_counter()
        if is_done := data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            outcome.error = f"in the stream: {_message(data)}"
            return
        if (text := _text_of(event)) is not None:
            outcome.text += text
            if last:
                outcome.itls.append(now - last)
            else:
                outcome.ttft = now - outcome.start
            outcome.latency = now - outcome.start
            last = now
        if usage := event.get("usage"):
            outcome.has_usage = True
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not last:
        outcome.error = "the stream brought no token"
    elif not is_done:
        outcome.error = "the stream broke off"
    elif not outcome.has_usage:
        outcome.output_tokens = len(outcome.itls) + 1


def _text_of(event: dict[str, Any]) -> str | None:
    """The text that a chunk brings; None for a role, a usage or an end alone."""
    if not (choices := event.get("choices")):
        return None
    if "delta" not in choices[0]:
        return choices[0].get("text")
    delta = choices[0]["delta"]
    text = delta.get("content")
    if text is None:
        text = delta.get("reasoning_content") or delta.get("reasoning")
    return text if text or not delta.get("role") else None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event, as soon as it is whole."""
    buffer = b""
    async for piece in response.content.iter_any():
        buffer += piece
        while (found := _boundary(buffer)) is not None:
            head, buffer = buffer[: found[0]], buffer[found[1] :]
            lines = [line[5:].strip() for line in head.decode().splitlines() if line.startswith("data:")]
            if lines:
                yield "\n".join(lines)


def _boundary(buffer: bytes) -> tuple[int, int] | None:
    """Where the first event ends and the next begins; lines may end in LF or CRLF."""
    found = [(at, at + len(mark)) for mark in (b"\n\n", b"\r\n\r\n") if (at := buffer.find(mark)) >= 0]
    return min(found, default=None)


def _message(text: str) -> str:
    """What an error body says, in one short line."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    return " ".join(text.split())[:_MAX_ERROR] or "(no reason given)"
