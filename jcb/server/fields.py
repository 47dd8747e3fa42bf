"""Fields outside our schema: which are known and refused, which are labels, which are unknown.

Nothing is ignored in silence: a known field that is not implemented is a 400 unless its value asks for
nothing; labels and unknown fields are named in the response header `x-jcb-ignored-fields`.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping

from aiohttp import web

from jcb.server.service import Service
from jcb.types import RequestError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-jcb-ignored-fields"
IGNORED = web.RequestKey("ignored_fields", list[str])

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "adapter_id": ("",),
    "adapters": (),
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "chat_template": (),
    "conversation": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_whitespace_pattern": (),
    "include": ([],),
    "include_reasoning": (True, False),
    "input": (),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ([],),
    "lora_path": ("",),
    "lora_request": (),
    "max_tool_calls": (),
    "media_io_kwargs": ({},),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "prompt_embeds": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Fields that other servers or other endpoints honour, with the values that ask for nothing. An endpoint whose schema
has the field never looks here.
"""

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "session_id"})
"""Fields that name things for the caller and change no answer: they go nowhere, so what providers of identities
make up may stand in them.
"""

MAX_LABEL_CHARS = 128
MAX_NAMES = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def check_extra(request: web.Request, service: Service, extra: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuses or reports the fields of `extra`; those reported end up in the response header."""
    names = [name for name in extra if name not in NEUTRAL]
    for name, value in extra.items():
        if name in NEUTRAL and not _is_neutral(name, value):
            raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_field")
        if name in LABELS and name != "metadata":
            _check_label(name, value)
    unknown = [name for name in names if name not in LABELS]
    if unknown and service.config.strict_fields:
        raise _unknown(unknown[0], known)
    shown = [_safe(name) for name in names[:MAX_NAMES]]
    request[IGNORED] = request.get(IGNORED, []) + shown
    for name in (_safe(name) for name in unknown[:MAX_NAMES]):
        if name not in service.reported_fields and len(service.reported_fields) < 8 * MAX_NAMES:
            service.reported_fields.add(name)
            logger.warning("unknown request field %s is ignored (reported once)", name)


def _check_label(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS or not value.isprintable():
        raise RequestError(
            f"{name} must be a text of at most {MAX_LABEL_CHARS} printable characters", param=name, code="invalid_value"
        )


def _is_neutral(name: str, value: object) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name])


def _unknown(name: str, known: Iterable[str]) -> RequestError:
    close = difflib.get_close_matches(name[:64], [*known], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return RequestError(f"unknown field {_safe(name)}{hint}", param=_safe(name), code="unknown_field")


def _safe(name: str) -> str:
    return _UNSAFE.sub("_", name[:64])
