"""Pictures of the playground while a model answers a crowd: a real server, a real page, one wide and one narrow.

python -m jcb.bench.playground_pictures        writes wide.png and narrow.png next to the page's own files
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from jcb.bench.browser import Page, find_chromium, open_page
from jcb.bench.server_process import serving

FOLDER = Path(__file__).parents[1] / "server" / "playground"
SERVER = (
    "--live-knobs", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "512",
    "--kv-cache-memory", "160M", "--set", "scheduler.queue_timeout=600",
)  # fmt: skip
STEPS = 84
"""Steps before the picture is taken: about what the wide page shows."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Take the playground's two pictures."""

    folder: Path = FOLDER  # where they go
    crowd: int = 20  # requests at once, more than there are slots


async def take(url: str, options: Options) -> None:
    """Opens the page twice and writes what it shows."""
    executable = find_chromium()
    assert executable is not None
    for name, width, dark in (("wide", 1440, False), ("narrow", 360, True)):
        async with open_page(executable) as page:
            await page.resize(width, 1000, dark=dark)
            await page.open(url)
            await _make_traffic(page, options.crowd)
            await page.evaluate("scrollTo(0, 0)")
            path = options.folder / f"{name}.png"
            await page.picture(path, height=await page.evaluate("document.documentElement.scrollHeight"))
            print(f"wrote {path}, {path.stat().st_size:,} bytes")
            if page.errors:
                raise RuntimeError(f"the page reported errors: {page.errors}")
            await page.click("#stop")


async def _make_traffic(page: Page, crowd: int) -> None:
    """A long answer first, then a crowd for the other slots; returns while some of it still waits."""
    await page.until("document.getElementById('link').textContent === 'live'")
    await page.evaluate("document.getElementById('max-tokens').value = 256")
    await page.click("#message")
    await page.type("Why does batching make a server faster?")
    await page.press("Enter", 13, "\r")
    await page.until("document.querySelector('.assistant p').textContent.length > 0", 120)
    await page.evaluate(f"document.getElementById('crowd-size').value = {crowd}")
    await page.evaluate("document.getElementById('max-tokens').value = 48")
    await page.click("#crowd")
    await page.until(f"document.getElementById('time').max >= {STEPS}", 500)
    await page.until("document.getElementById('running').textContent.startsWith('8')", 60)


def main() -> int:
    """Takes the pictures; status 2 without a Chromium."""
    options = tyro.cli(Options, prog="playground_pictures")
    if find_chromium() is None:
        print("no Chromium found: install it (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with serving(SERVER) as url:
        asyncio.run(take(url, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
