"""Every failure as OpenAI's error body: {"error": {message, type, param, code}}, whatever raised it."""

from __future__ import annotations

import http
import logging
import math
import traceback
import uuid

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from jcb.types import RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1024

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_object(error: RequestError) -> dict[str, object]:
    """The body of `error`, also the event of a stream that fails on its way."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = error.message if len(error.message) <= MAX_MESSAGE_CHARS else error.message[: MAX_MESSAGE_CHARS - 1] + "…"
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> web.Response:
    """`error` as a response, with Retry-After where it says when."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = msgspec.json.encode(error_object(error))
    return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)


def raw_error(error: RequestError) -> bytes:
    """`error` as a whole HTTP response, for a connection that never became a request."""
    response = error_response(error)
    body = response.body
    assert isinstance(body, bytes)
    headers = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception of a handler into a response; nothing of a request's content is logged."""
    try:
        return await handler(request)
    except RequestError as error:
        response = error_response(error)
        if request.content.exception() is not None or error.status == 408:
            response.force_close()  # the body broke off: where the next request begins is unknown
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(_from_http(error))
        if allow := error.headers.get("Allow"):
            response.headers["Allow"] = allow
        return response
    except ConnectionResetError:  # the client is gone: this reaches nobody
        return web.Response(status=499)
    except Exception as error:
        return error_response(internal_error(error))


def without_content(record: logging.LogRecord) -> bool:
    """A log filter that leaves the kind of an exception and drops its words, which may quote the request."""
    if record.exc_info and record.exc_info[0] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", ()
    record.exc_info = record.exc_text = None
    return True


def internal_error(error: Exception) -> RequestError:
    """A 500 with a mark that finds the trace in the log; the exception's own words stay out of both."""
    mark = uuid.uuid4().hex[:12]
    trace = "".join(traceback.format_tb(error.__traceback__))
    logger.error("internal error %s: %s\n%s", mark, type(error).__name__, trace)
    return RequestError(f"internal error {mark}", status=500, code="internal_error")


def _from_http(error: web.HTTPException) -> RequestError:
    messages = {
        404: "no such route",
        405: "this method is not allowed on this route",
        413: "the body is too large",
    }
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    return RequestError(
        messages.get(error.status, error.reason), status=error.status, code=codes.get(error.status, "http_error")
    )
