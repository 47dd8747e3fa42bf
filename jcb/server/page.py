"""The page at `/`: the files of playground/, read once, with headers that let it load nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

INDEX = "index.html"
_FOLDER = Path(__file__).parent / "playground"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def read_files() -> Mapping[str, bytes]:
    """Name → content of every file that the page may ask for."""
    return {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}


async def page(request: web.Request) -> web.Response:
    """The page itself."""
    return _response(request, INDEX)


async def part(request: web.Request) -> web.Response:
    """A script or style of the page; 404 for any other name."""
    return _response(request, request.match_info["name"])


def _response(request: web.Request, name: str) -> web.Response:
    content = request.app[FILES].get(name)
    if content is None:
        raise web.HTTPNotFound
    kind = _TYPES[Path(name).suffix]
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)


FILES = web.AppKey("playground", Mapping[str, bytes])
