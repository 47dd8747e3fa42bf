"""What the handlers serve from: the engine and its texts once loaded, and how far loading is until then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from jcb.config import ServerConfig
from jcb.engine.admission import ModelInfo
from jcb.engine.async_engine import AsyncEngine, EngineState
from jcb.server.connections import ConnectionLimit
from jcb.server.tracing import NoTracer, Tracer
from jcb.text.chat import ChatTemplate
from jcb.text.tokenizer import Tokenizer
from jcb.types import RequestError


class Profiler(Protocol):
    """Records what the device does."""

    def start(self, folder: str) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A loaded model, ready to answer."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    info: ModelInfo
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling fields where the model's files give them
    profiler: Profiler | None = None


@dataclass(slots=True, kw_only=True)
class Service:
    """The state of one server. `served` is None until `attach`; then it never changes again."""

    config: ServerConfig
    served: Served | None = None
    stage: str = "load"
    done: int = 0
    total: int = 0
    started: int = field(default_factory=lambda: int(time.time()))
    reported_fields: set[str] = field(default_factory=set)  # unknown fields already named in the log
    tracer: Tracer = field(default_factory=NoTracer)
    connections: ConnectionLimit | None = None  # once it listens
    is_profiling: bool = False
    is_closing: bool = False  # streams without an end of their own end now

    def progress(self, stage: str, done: int, total: int) -> None:
        """How far loading is; any thread may call it."""
        self.stage, self.done, self.total = stage, done, total

    def attach(self, served: Served) -> None:
        """Begins to serve: starts the engine in the running event loop."""
        served.engine.start()
        self.served = served

    @property
    def state(self) -> EngineState:
        if self.served is not None:
            return self.served.engine.state
        return EngineState.COMPILING if self.stage == "compile" else EngineState.LOADING

    @property
    def is_ready(self) -> bool:
        return self.served is not None and self.served.engine.is_healthy and not self.served.engine.is_draining

    def require(self) -> Served:
        """The loaded model, or the 503 of a server that cannot answer now."""
        if self.served is None:
            raise RequestError(
                f"the model is {self.state}: try again later", status=503, code="loading", retry_after=2.0
            )
        if self.served.engine.is_draining:
            raise RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5.0)
        return self.served

    @property
    def model_name(self) -> str:
        """The name clients use, and responses carry."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return self.served.info.name if self.served is not None else ""

    def check_model(self, name: str | None) -> None:
        """RequestError 404 unless `name` is the served model or not given."""
        if name is not None and name != self.model_name:
            shown = "".join(c for c in name[:64] if c.isprintable())
            raise RequestError(
                f"The model {shown!r} does not exist here; served: {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )


SERVICE = web.AppKey("service", Service)
