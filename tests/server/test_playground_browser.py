"""The page as a person uses it, in headless Chromium: chat, watch the slots, turn a knob, look back."""

import asyncio
import contextlib

import pytest

from jcb.bench.browser import find_chromium, open_page
from jcb.config import ServerConfig

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: install the package chromium"),
    pytest.mark.usefixtures("scripted"),
]
WIDTHS = (1440, 360)


@contextlib.asynccontextmanager
async def visiting(server, width, *, height=1000, path="/"):
    """The page, with nothing in its console at the end."""
    async with open_page(find_chromium()) as page:
        await page.resize(width, height)
        await page.open(server.url + path)
        yield page
        assert page.errors == []


async def text(page, name):
    return await page.evaluate(f"document.getElementById({name!r}).textContent")


async def colours(page, name):
    """How many colours a canvas shows."""
    return await page.evaluate(
        f"(() => {{ const c = document.getElementById({name!r});"
        " const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
        " return new Set(d).size; })()"
    )


async def check_width(page, width):
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    wide = await page.evaluate(
        "[...document.querySelectorAll('body *:not(.hidden):not(.skip)')]"
        f".filter(e => e.getClientRects().length && e.getBoundingClientRect().right > {width} + 0.5"
        " && !e.closest('.scroll')).map(e => e.tagName + '#' + e.id)"
    )
    assert wide == []


async def ask(page, words):
    await page.click("#message")
    await page.type(words)
    await page.press("Enter", 13, "\r")


@pytest.mark.parametrize("width", WIDTHS)
async def test_chat_watch_turn_and_look_back(start_server, width):
    server = await start_server(
        server=ServerConfig(port=0, live_knobs=True), page_size=16, num_pages=513, max_model_len=2048
    )
    server.slow_down(0.02)
    server.async_engine.metrics.step_size = 16
    async with visiting(server, width) as page:
        await page.until("document.getElementById('link').textContent === 'live'")
        await page.until("document.getElementById('max_num_seqs_out').textContent === '8 of 8'")
        await page.until("document.getElementById('model').textContent === 'fake'")
        before = await colours(page, "slots")

        await page.evaluate("document.getElementById('max-tokens').value = 60")
        await ask(page, "Hello there")
        await page.until("document.querySelector('.assistant p').textContent.length > 5")
        assert await page.evaluate("document.getElementById('send').disabled")
        await page.click("#crowd")
        await page.until("document.getElementById('running').textContent.startsWith('8')")
        assert await colours(page, "slots") > before + 3
        assert await colours(page, "tokens") > 3
        assert await colours(page, "pages") > 3
        assert "shared" in await text(page, "pages-summary")
        await check_width(page, width)

        await page.evaluate("document.getElementById('max_num_seqs').focus()")
        for _ in range(5):
            await page.press("ArrowLeft", 37)
        await page.click("#knobs button")
        await page.until("document.getElementById('knobs-status').textContent.startsWith('Applied')")
        assert server.engine.core.scheduler.config.max_num_seqs == 3
        await page.until("document.getElementById('running').textContent === '3 of 3'")

        await page.click("#pause")
        await page.until("document.getElementById('link').dataset.state === 'paused'")
        summary = await text(page, "summary")
        await asyncio.sleep(0.3)
        assert await text(page, "summary") == summary  # time stands still
        await page.evaluate("document.getElementById('time').focus()")
        for _ in range(8):
            await page.press("ArrowLeft", 37)
        back = await text(page, "summary")
        assert int(back.split()[1].rstrip(":")) == int(summary.split()[1].rstrip(":")) - 8
        assert await text(page, "said") == back
        assert "before the newest step" in await text(page, "moment")
        await page.click("#live")
        await page.until("document.getElementById('link').dataset.state === 'live'")

        await page.click("#stop")
        await page.until("document.querySelector('.assistant .note').textContent !== ''")
        await page.click("#rows-panel summary")
        await check_width(page, width)
    server.slow_down(0)
    await server.settle()


async def test_a_refused_knob_says_why(start_server):
    server = await start_server(server=ServerConfig(port=0, live_knobs=True))
    async with visiting(server, 800) as page:
        await page.until("document.getElementById('max_num_seqs_out').textContent === '8 of 8'")
        await page.evaluate("document.getElementById('max_num_batched_tokens').value = 2")
        with contextlib.suppress(AssertionError):
            await page.click("#knobs button")
        await page.until("document.getElementById('knobs-status').textContent.startsWith('Refused')")
        assert "max_num_batched_tokens=2 must be a whole number from 8 to 64" in await text(page, "knobs-status")
        page.errors.clear()  # the browser itself reports the 400


async def test_knobs_are_shut_where_the_operator_did_not_open_them(start_server):
    server = await start_server()
    async with visiting(server, 800) as page:
        await page.until("document.getElementById('knobs-hint').textContent.includes('--live-knobs')")
        assert await page.evaluate("document.getElementById('knobs-set').disabled")


async def test_a_key_is_asked_for_and_kept_nowhere(start_server, tmp_path):
    (tmp_path / "keys").write_text("canary7q\n")
    server = await start_server(server=ServerConfig(port=0, api_key_file=str(tmp_path / "keys")))
    async with visiting(server, 800) as page:
        await page.until("!document.getElementById('key-panel').hidden")
        for key, is_right in (("wrong", False), ("canary7q", True)):
            await page.evaluate("document.getElementById('key').value = ''")
            await page.click("#key")
            await page.type(key)
            await page.press("Enter", 13, "\r")
            if not is_right:
                await page.until("document.getElementById('key-error').textContent.includes('API key')")
        await page.until("document.getElementById('link').textContent === 'live'")
        assert await page.evaluate("document.getElementById('key-panel').hidden")
        await ask(page, "Hello")
        await page.until("document.querySelector('.assistant .note').textContent.includes('tokens')")
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "canary7q" not in await page.evaluate(stored)
        assert all("401" in error for error in page.errors)
        page.errors.clear()  # the browser itself reports the 401s


async def test_it_finds_the_server_again(start_server):
    server = await start_server()
    async with visiting(server, 800) as page:
        await page.until("document.getElementById('link').textContent === 'live'")
        for watcher in range(2):
            server.service.is_closing = True
            await page.until("document.getElementById('link').dataset.state === 'off'")
            server.service.is_closing = False
            await page.until("document.getElementById('link').textContent === 'live'")
            assert server.async_engine.feed.num_watchers == 1, watcher


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_everything_has_a_name_a_focus_and_enough_contrast(start_server, dark):
    server = await start_server(server=ServerConfig(port=0, live_knobs=True))
    async with visiting(server, 1440) as page:
        await page.resize(1440, 1000, dark=dark)
        await page.until("document.getElementById('max_num_seqs_out').textContent === '8 of 8'")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "textbox", "slider", "spinbutton", "combobox", "img", "log", "region", "group", "link"}
        roles |= {"DisclosureTriangle"}
        found = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and node["role"]["value"] in roles
        ]
        assert len(found) > 20
        assert [pair for pair in found if not pair[1] and pair[0] != "group"] == []
        seen = []
        for _ in range(40):
            await page.press("Tab", 9)
            name = await page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
            if name in seen or await page.evaluate("document.activeElement === document.body"):
                break
            seen.append(name)
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{name} does not show its focus"
        order = ["Skip to the live batch", "clear", "log", "message", "send", "crowd-size", "crowd", "pause", "time",
                 "max_num_batched_tokens", "max_num_seqs", "policy"]  # fmt: skip
        assert [name for name in seen if name in order] == order
        weak = await page.evaluate(CONTRAST)
        assert weak == []


CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('body *')].filter((e) => e.getClientRects().length && !e.closest(':disabled')
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
      const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
      return [e.tagName + '#' + e.id + '.' + e.className, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    }).filter(([, ratio]) => ratio < 4.5);
})()"""
