"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.server.chunks import ChunkShape
from jcb.server.logprobs import chat_content, id_name, prompt_logprobs
from jcb.server.params import chat_params, check_labels, check_stream, namespace
from jcb.server.prompts import encode_messages, truncate
from jcb.server.reply import reply
from jcb.server.schema import ChatBody
from jcb.server.service import SERVICE
from jcb.server.tools import ToolReader, ToolUse, tool_use
from jcb.server.usage import UsageCounter
from jcb.text.tokenizer import Tokenizer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    service = request.app[SERVICE]
    served = service.require()
    body = await ChatBody.read(request, service, before=served.engine.check_room)
    check_stream(body)
    check_labels(request, body)
    tools = tool_use(body, served)
    params = chat_params(body, served.defaults, tools)
    ids = await encode_messages(served, body.messages, body, None if tools is None else tools.tools)
    ids = truncate(ids, body, served.info, params.max_tokens)
    stream = await served.engine.submit([ids], params, priority=body.priority, namespace=namespace(request, body))
    shape = ChatShape(service.model_name, body, served.tokenizer, ids, tools)
    return await reply(request, stream, shape, streams=body.stream)


class ChatShape(ChunkShape):
    """`chat.completion` bodies and chunks: role, then one chunk a token, then the end."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, model: str, body: ChatBody, tokenizer: Tokenizer, prompt_ids: list[int], tools: ToolUse | None = None
    ) -> None:
        super().__init__(model, body, UsageCounter([len(prompt_ids)], body.n))
        self._must_call = tools is not None and tools.must_call
        self._readers = {} if tools is None else {index: ToolReader(tools) for index in range(body.n)}
        self._tokenizer = tokenizer
        self._body = body
        self._prompt_ids = prompt_ids

    def opening_chunks(self) -> list[dict[str, Any]]:
        """The role chunks carry no text: clients do not count them as a token."""
        extra = {"prompt_token_ids": self._prompt_ids} if self._body.return_token_ids else {}
        role = {"role": "assistant", "content": None if self._must_call else ""}
        return [{"choices": [self._chunk(index, role)], **extra} for index in range(self._body.n)]

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        chunks = [self._chunk(output.index, delta) for delta in self._deltas(output)]
        if chunks:
            chunks[0]["logprobs"] = self._logprobs(output.logprobs)
            if self._body.return_token_ids:
                chunks[0]["token_ids"] = output.token_ids
        if output.finish_reason is not None:
            chunk = self._chunk(output.index, {})
            chunk["finish_reason"] = self._finish_reason(output.index, output.finish_reason)
            chunk["stop_reason"] = output.stop_reason
            chunks.append(chunk)
        return [{"choices": [chunk]} for chunk in chunks]

    def choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if reader := self._readers.get(choice.index):
            reader.deltas(choice.text, is_last=True)
            message = reader.message()
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice.index, choice.finish_reason),
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

    def _deltas(self, output: RequestOutput) -> list[dict[str, Any]]:
        """What an output adds to its message; with tools perhaps nothing yet."""
        reader = self._readers.get(output.index)
        if reader is None:
            return [{"content": output.text}] if output.token_ids or output.text else []
        deltas = reader.deltas(output.text, is_last=output.finish_reason is not None)
        tells_tokens = output.token_ids and (self._body.logprobs or self._body.return_token_ids)
        return deltas or ([{}] if tells_tokens else [])

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        reader = self._readers.get(index)
        return reason if reader is None else reader.finish_reason(reason)

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: tuple | list) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        name = id_name if self._body.return_tokens_as_token_ids else self._tokenizer.token_text
        content = chat_content(self._tokenizer, entries, self._body.top_logprobs or 0, name)
        return {"content": content, "refusal": None}
