"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.server.logprobs import chat_content, prompt_logprobs
from jcb.server.params import chat_params, check_labels, check_stream, namespace
from jcb.server.prompts import encode_messages
from jcb.server.reply import collect_reply, stream_reply
from jcb.server.schema import ChatBody
from jcb.server.service import SERVICE
from jcb.server.usage import UsageCounter
from jcb.text.tokenizer import Tokenizer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = request.app[SERVICE]
    served = service.require()
    body = await ChatBody.read(request, service)
    check_stream(body)
    check_labels(request, body)
    params = chat_params(body, served.defaults)
    ids = await encode_messages(
        served,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
    )
    stream = await served.engine.submit([ids], params, priority=body.priority, namespace=namespace(request, body))
    shape = ChatShape(served.tokenizer, body, ids)
    usage = UsageCounter([len(ids)], body.n)
    async with stream:
        if body.stream:
            return await stream_reply(request, stream, shape, usage, service.model_name, _keep, body.stream_options)
        return await collect_reply(stream, shape, usage, service.model_name, _keep)


class ChatShape:
    """`chat.completion` bodies and chunks: role, then one chunk a token, then the end."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prompt_ids = prompt_ids

    def opening(self) -> list[dict[str, Any]]:
        """The role chunks carry no text: clients do not count them as a token."""
        extra = {"prompt_token_ids": self._prompt_ids} if self._body.return_token_ids else {}
        role = {"role": "assistant", "content": ""}
        return [{"choices": [self._chunk(index, role)], **extra} for index in range(self._body.n)]

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        chunks = []
        if output.token_ids or output.text:
            chunk = self._chunk(output.index, {"content": output.text})
            chunk["logprobs"] = self._logprobs(output.logprobs)
            if self._body.return_token_ids:
                chunk["token_ids"] = output.token_ids
            chunks.append(chunk)
        if output.finish_reason is not None:
            chunk = self._chunk(output.index, {})
            chunk["finish_reason"] = output.finish_reason
            chunk["stop_reason"] = output.stop_reason
            chunks.append(chunk)
        return [{"choices": [chunk]} for chunk in chunks]

    def choice(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def extras(self, choices: list[Choice]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = self._prompt_ids
        if self._body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, len(self._prompt_ids), choices[0].prompt_logprobs, self._body.prompt_logprobs
            )
        return extra

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: tuple | list) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_content(self._tokenizer, entries, self._body.top_logprobs or 0), "refusal": None}


def _keep(output: RequestOutput) -> RequestOutput:
    return output
