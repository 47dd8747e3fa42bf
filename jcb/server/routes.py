"""Every route: who may call it, what it reads and what it answers. The application, the access rules, the OpenAPI
document and the tests are all made from this one table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp.typedefs import Handler
from pydantic import BaseModel

from jcb.config import ServerConfig
from jcb.server import answers as a
from jcb.server import batch, health, metrics, models, openapi, page, profile, tokens
from jcb.server.access import Access
from jcb.server.capabilities import capabilities
from jcb.server.chat import chat_completions
from jcb.server.completions import completions
from jcb.server.responses import responses
from jcb.server.responses_schema import ResponsesBody
from jcb.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. body: the model that validates it. answer: what a 200 holds; None: no JSON."""

    method: str
    path: str
    handler: Handler
    summary: str
    access: Access = Access.USER
    body: type[Body] | None = None
    answer: type[BaseModel] | None = None
    streams: bool = False


ROUTES = (
    Route("GET", "/live", health.live, "The event loop turns", Access.PUBLIC),
    Route("GET", "/ready", health.ready, "Whether it can answer, else how far it is", Access.PUBLIC, answer=a.Ready),
    Route("GET", "/health", health.health, "200 when it can answer, else 503", Access.PUBLIC),
    Route("GET", "/version", health.version, "The version of jcb", answer=a.Version),
    Route("GET", "/metrics", metrics.metrics, "Numbers for Prometheus"),
    Route("GET", "/openapi.json", openapi.openapi, "This document"),
    Route("GET", "/v1/models", models.list_models, "The model served", answer=a.ModelList),
    Route("GET", "/v1/models/{id:.+}", models.get_model, "The model by its name", answer=a.ModelCard),
    Route("GET", "/v1/capabilities", capabilities, "What is done with each request field", answer=a.Capabilities),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info, "The tokenizer's configuration", answer=a.TokenizerInfo),
    Route("POST", "/tokenize", tokens.tokenize, "Token ids of a text", body=TokenizeBody, answer=a.Tokens),
    Route("POST", "/detokenize", tokens.detokenize, "The text of token ids", body=DetokenizeBody, answer=a.Text),
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Complete text or token ids",
        body=CompletionBody,
        answer=a.Completion,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        body=ChatBody,
        answer=a.ChatCompletion,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses,
        "Answer a text, keeping nothing",
        body=ResponsesBody,
        answer=a.Response,
        streams=True,
    ),
)

PROFILE_ROUTES = (
    Route("POST", "/start_profile", profile.start, "Begin to record what the device does", Access.ADMIN),
    Route("POST", "/stop_profile", profile.stop, "Write what was recorded", Access.ADMIN),
)

EVENTS = Route(
    "GET",
    "/v1/batch/events",
    batch.events,
    "The live batch: server-sent events without an end",
    Access.WATCHER,
    streams=True,
)
PLAYGROUND_ROUTES = (
    Route("GET", "/", page.page, "The playground: a page for browsers", Access.PUBLIC),
    Route("GET", "/playground/{name}", page.part, "Scripts and styles of that page", Access.PUBLIC),
    EVENTS,
    Route("GET", "/v1/batch/knobs", batch.knobs, "What can be changed while it runs", answer=a.Knobs),
)
KNOBS_ROUTE = Route(
    "POST",
    "/v1/batch/knobs",
    batch.turn_knobs,
    "Change it between two steps",
    Access.ADMIN,
    body=batch.KnobsBody,
    answer=a.Knobs,
)


def routes(config: ServerConfig) -> tuple[Route, ...]:
    """The routes on the main port of a server with `config`."""
    return tuple(route for route in _all(config) if not (config.admin_port and _is_private(route)))


def admin_routes(config: ServerConfig) -> tuple[Route, ...]:
    """The routes on its admin port: what the main one then lacks, and the probes."""
    return tuple(route for route in _all(config) if _is_private(route) or route.access is Access.PUBLIC)


def _all(config: ServerConfig) -> tuple[Route, ...]:
    found = ROUTES + (PROFILE_ROUTES if config.profile_folder else ())
    found += PLAYGROUND_ROUTES if config.playground else ()
    return found + ((KNOBS_ROUTE,) if config.playground and config.live_knobs else ())


def _is_private(route: Route) -> bool:
    return route.access is Access.ADMIN or route.path == "/metrics"


def canonical(path: str) -> str:
    """A path as aiohttp's resources have it: patterns of variables left out."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)
