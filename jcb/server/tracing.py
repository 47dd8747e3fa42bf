"""Spans of requests for OpenTelemetry, where an operator asks for them; otherwise nothing, at no cost.

A span holds numbers and names only: neither prompts nor answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from jcb.engine.output import RequestOutput, RequestTimes
from jcb.server.usage import UsageCounter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


class Trace(Protocol):
    """One request's span."""

    def add(self, output: RequestOutput) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def end(self, usage: UsageCounter) -> None: ...


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, request: web.Request) -> Trace: ...

    def close(self) -> None: ...


class NoTracer:
    """Traces nothing."""

    def begin(self, request: web.Request) -> Trace:
        return self

    def add(self, output: RequestOutput) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def end(self, usage: UsageCounter) -> None: ...

    def close(self) -> None: ...


class OtlpTracer:
    """Sends a span `llm_request` for each request to a collector, as part of the caller's trace if it names one."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        """Opens the exporter to `endpoint` (OTLP over HTTP). ValueError when the `otlp` extra is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ValueError(
                f"otlp_endpoint={endpoint!r} needs the otlp extra: pip install --editable '.[otlp]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jcb"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jcb")

    def begin(self, request: web.Request) -> Trace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span("llm_request", context=parent, kind=SpanKind.SERVER)
        span.set_attribute("http.route", request.path)
        return _SpanTrace(span)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class _SpanTrace:
    """Gathers what a span tells of its request."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._reasons: list[str] = []
        self._times: RequestTimes | None = None

    def add(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._reasons.append(output.finish_reason.value)
        if self._times is None:
            self._times = output.times

    def fail(self, error: BaseException) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR)
        self._span.set_attribute("error.type", type(error).__name__)

    def end(self, usage: UsageCounter) -> None:
        counts = usage.usage()
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": counts["prompt_tokens"],
            "gen_ai.usage.output_tokens": counts["completion_tokens"],
            "gen_ai.response.finish_reasons": self._reasons,
        }
        if self._times is not None:
            attributes["gen_ai.latency.e2e"] = self._times.ended
            attributes["gen_ai.latency.time_in_queue"] = self._times.started
            attributes["gen_ai.latency.time_to_first_token"] = self._times.first_token
        self._span.set_attributes(attributes)
        self._span.end()


def make_tracer(endpoint: str) -> Tracer:
    """The tracer an operator asked for."""
    return OtlpTracer(endpoint) if endpoint else NoTracer()
