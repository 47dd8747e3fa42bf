"""Headless Chromium driven over its DevTools protocol, for the playground's pictures and tests. Needs no driver."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. errors: what its console reported as an error, exceptions and failed loads included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def attach(self) -> None:
        """Makes the tab; call it first."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Loads `url`."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def resize(self, width: int, height: int, *, scale: float = 1.0, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the theme of the system."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; RuntimeError when it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {_text_of(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Waits for an expression to be true; TimeoutError names it."""
        deadline = time.monotonic() + seconds
        while not (value := await self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true after {seconds} s: {expression}")
            await asyncio.sleep(0.05)
        return value

    async def click(self, selector: str) -> None:
        """Scrolls an element into view and clicks on its middle."""
        x, y = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Types into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Presses and releases a key; code: its Windows virtual key code."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def picture(self, path: Path, height: int = 0) -> None:
        """Writes a PNG of the window, or of the page's first `height` pixels."""
        width = await self.evaluate("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(height), **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; RuntimeError when it is refused."""
        number = len(self._calls) + 1
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(60):
            answer = await future
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def close(self) -> None:
        """Stops listening."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._calls[data["id"]].set_result(data)
            elif error := _error_of(data.get("method"), data.get("params", {})):
                self.errors.append(error)


def _error_of(method: str | None, params: dict[str, Any]) -> str:
    if method == "Runtime.exceptionThrown":
        return _text_of(params["exceptionDetails"])
    if method == "Log.entryAdded" and params["entry"]["level"] == "error":
        return f"{params['entry']['text']} {params['entry'].get('url', '')}"
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return str([argument.get("value") for argument in params["args"]])
    return ""


def _text_of(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]


@contextlib.asynccontextmanager
async def open_page(executable: str) -> AsyncGenerator[Page]:
    """A fresh Chromium with one tab, ended afterwards."""
    sandbox = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                url = await _url_of(process.stderr)
            drain = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    await page.attach()
                    yield page
                finally:
                    await page.close()
            process.terminate()
            await drain
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            await process.wait()


async def _url_of(stream: asyncio.StreamReader) -> str:
    """What Chromium says it listens on; RuntimeError with its last words when it ends before."""
    words = b""
    while line := await stream.readline():
        words += line
        if b"DevTools listening on " in line:
            return line.split(b" on ", 1)[1].strip().decode()
    raise RuntimeError(f"Chromium did not start: {words[-1000:].decode(errors='replace')}")
