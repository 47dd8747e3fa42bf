"""POST /tokenize and /detokenize and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from jcb.engine.admission import check_int
from jcb.server.prompts import LONG_TEXT, encode_messages
from jcb.server.schema import DetokenizeBody, TokenizeBody
from jcb.server.service import SERVICE
from jcb.types import RequestError


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of a conversation."""
    service = request.app[SERVICE]
    served = service.require()
    body = await TokenizeBody.read(request, service)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of them", param="prompt", code="invalid_value")
    if body.messages is not None:
        ids = await encode_messages(served, body.messages, body)
    else:
        text = body.prompt or ""
        special = body.add_special_tokens or "add_special_tokens" not in body.model_fields_set
        encode = served.tokenizer.encode
        if len(text) > LONG_TEXT:
            ids = await asyncio.to_thread(encode, text, add_special_tokens=special)
        else:
            ids = encode(text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.info.max_model_len, "tokens": ids}
    answer["token_strs"] = [served.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    service = request.app[SERVICE]
    served = service.require()
    body = await DetokenizeBody.read(request, service)

    def decode() -> str:
        for token in body.tokens:
            check_int("tokens", token, 0, served.info.vocab_size - 1)
        return served.tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await asyncio.to_thread(decode) if len(body.tokens) > LONG_TEXT else decode()
    return web.Response(body=msgspec.json.encode({"prompt": text}), content_type="application/json")


async def tokenizer_info(request: web.Request) -> web.Response:
    """What tokenizer_config.json holds: evaluation tools count and cut tokens by it without a copy of their own."""
    tokenizer = request.app[SERVICE].require().tokenizer
    config = {"bos_token": None, "eos_token": None, "pad_token": None, **tokenizer.config()}
    config["chat_template"] = tokenizer.chat_template
    return web.Response(body=msgspec.json.encode(config), content_type="application/json")
