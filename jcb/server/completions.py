"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from jcb.engine.choice import Choice
from jcb.engine.output import RequestOutput
from jcb.server.chunks import ChunkShape
from jcb.server.logprobs import CompletionLogprobs, join_pieces, prompt_logprobs
from jcb.server.params import check_labels, check_stream, completion_params, namespace
from jcb.server.prompts import Prompt, encode_prompt, parse_prompts, truncate
from jcb.server.reply import reply
from jcb.server.schema import CompletionBody
from jcb.server.service import SERVICE
from jcb.server.usage import UsageCounter
from jcb.text.tokenizer import Tokenizer
from jcb.types import FinishReason


async def completions(request: web.Request) -> web.StreamResponse:
    """Completes text or token ids."""
    service = request.app[SERVICE]
    served = service.require()
    body = await CompletionBody.read(request, service, before=served.engine.check_room)
    check_stream(body)
    check_labels(request, body)
    prompts = parse_prompts(body.prompt, body.n)
    ids = [await encode_prompt(served, prompt, add_special_tokens=body.add_special_tokens) for prompt in prompts]
    ids = [truncate(prompt, body, served.info, body.max_tokens) for prompt in ids]
    params = completion_params(body, served.defaults, served.info.max_model_len - max(map(len, ids)))
    stream = await served.engine.submit(ids, params, priority=body.priority, namespace=namespace(request, body))
    shape = CompletionShape(service.model_name, body, served.tokenizer, prompts, ids)
    return await reply(request, stream, shape, streams=body.stream)


class CompletionShape(ChunkShape):
    """`text_completion` bodies and chunks; with `echo` the prompt comes first."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        body: CompletionBody,
        tokenizer: Tokenizer,
        prompts: list[Prompt],
        prompt_ids: list[list[int]],
    ) -> None:
        super().__init__(model, body, UsageCounter([len(prompt) for prompt in prompt_ids], body.n))
        self._tokenizer = tokenizer
        self._body = body
        self._prompts: list[Prompt] = prompts if body.truncate_prompt_tokens is None else [*prompt_ids]
        self._prompt_ids = prompt_ids
        self._builders: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()  # choices that have a chunk

    def adjust(self, output: RequestOutput) -> RequestOutput:
        """With max_tokens 0 the prompt was run for its own sake."""
        if self._body.max_tokens != 0:
            return output
        reason = None if output.finish_reason is None else FinishReason.LENGTH
        return dataclasses.replace(output, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        index = output.index
        chunks = []
        is_first = index not in self._begun
        self._begun.add(index)
        if is_first and self._body.echo:
            pieces = self._prompt_piece(index, list(output.prompt_logprobs))
            chunks.append(self._fields(index, self._prompt_text(index), pieces, (), None, None))
        logprobs = self._builder(index).output(output.logprobs) if self._body.logprobs is not None else None
        fields = self._fields(index, output.text, logprobs, output.token_ids, output.finish_reason, output.stop_reason)
        chunks.append(fields)
        if is_first and self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt_ids[index // self._body.n]
        return [{"choices": [fields]} for fields in chunks]

    def choice(self, choice: Choice) -> dict[str, Any]:
        body, index = self._body, choice.index
        text, logprobs = choice.text, None
        if body.logprobs is not None:
            pieces = [self._prompt_piece(index, choice.prompt_logprobs)] if body.echo else []
            logprobs = join_pieces([p for p in pieces if p] + [self._builder(index).output(choice.logprobs)])
        if body.echo:
            text = self._prompt_text(index) + text
        fields = self._fields(index, text, logprobs, choice.token_ids, choice.finish_reason, choice.stop_reason)
        prompt_ids = self._prompt_ids[index // body.n]
        if body.return_token_ids:
            fields["prompt_token_ids"] = prompt_ids
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, len(prompt_ids), choice.prompt_logprobs, body.prompt_logprobs
            )
        return fields

    def _fields(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        token_ids: tuple[int, ...] | list[int],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = token_ids
        return fields

    def _builder(self, index: int) -> CompletionLogprobs:
        if index not in self._builders:
            self._builders[index] = CompletionLogprobs(
                self._tokenizer, self._body.logprobs or 0, as_ids=self._body.return_tokens_as_token_ids
            )
        return self._builders[index]

    def _prompt_piece(self, index: int, entries: list) -> dict[str, Any] | None:
        builder = self._builder(index)
        if self._body.logprobs is None:
            return None
        return builder.prompt(self._prompt_ids[index // self._body.n], entries)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)
