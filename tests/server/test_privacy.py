"""Nothing of what callers send or get is in the log, whatever goes wrong."""

import asyncio
import logging

import aiohttp
import pytest

from jcb.config import ServerConfig
from jcb.server.capabilities import BODIES, fields_of

CANARY = "canary7q"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{CANARY}-key\n")
    return str(path)


async def test_b127_no_prompt_output_key_or_token_in_the_log(start_server, key_file, caplog):
    caplog.set_level(logging.INFO)
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    headers = {"Authorization": f"Bearer {CANARY}-key"}
    prompt = tuple(CANARY.encode())
    server.executor.script[prompt] = list(CANARY.encode())
    everywhere = {"prompt": CANARY, "user": CANARY, "request_id": CANARY, "cache_salt": CANARY, "stop": [CANARY + "!"]}

    async def post(path, body, **kwargs):
        async with server.session.post(server.url + path, json=body, headers=headers, **kwargs) as response:
            return response.status, await response.text()

    assert CANARY in (await post(COMPLETIONS, everywhere))[1]
    for field in ("model", "seed", "stop", "tools", "temperature", "messages", "unknown", "logit_bias", "suffix"):
        await post(COMPLETIONS, everywhere | {field: CANARY})
        await post(CHAT, {"messages": [{"role": "user", "content": CANARY}], field: CANARY})
    await post("/tokenize", {"prompt": CANARY})
    await post("/detokenize", {"tokens": list(prompt)})
    async with server.session.post(server.url + COMPLETIONS, data=CANARY.encode() + b"\xff") as response:
        assert response.status == 401
    async with server.session.get(server.url + f"/{CANARY}?{CANARY}", headers=headers) as response:
        assert response.status == 404

    server.executor.fails_dispatch = lambda plan: True
    assert (await post(COMPLETIONS, everywhere))[0] == 500
    server.executor.fails_dispatch = lambda plan: False
    server.executor.step_seconds = 0.05
    with pytest.raises((asyncio.TimeoutError, aiohttp.ClientError)):
        await post(COMPLETIONS, everywhere, timeout=aiohttp.ClientTimeout(total=0.1))
    server.executor.step_seconds = 0

    def broken(ids):
        raise RuntimeError(f"{ids} {CANARY}")

    server.service.served.tokenizer.token_text = broken
    status, text = await post(COMPLETIONS, everywhere | {"logprobs": 1})
    assert status == 500
    assert CANARY not in text
    await server.settle()

    def dies(*args):
        raise RuntimeError(CANARY)

    server.engine.core.scheduler.schedule = dies
    assert (await post(COMPLETIONS, everywhere))[0] == 503
    assert caplog.records
    for record in caplog.records:
        text = logging.Formatter("%(name)s %(message)s").format(record)
        assert CANARY not in text
        assert str(list(prompt))[1:-1] not in text


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_b127_prompts_and_keys_come_back_in_no_error_and_no_metric(start_server, key_file, caplog, path):
    """A prompt and a key are in every request; then each field in turn is wrong, in several ways."""
    caplog.set_level(logging.INFO)
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    headers = {"Authorization": f"Bearer {CANARY}-key", "X-Request-Id": "label"}
    prompt = {"messages": [{"role": "user", "content": CANARY}]} if "chat" in path else {"prompt": CANARY}
    prompt = {"input": CANARY} if "responses" in path else prompt
    for field in fields_of(BODIES[path]):
        for value in ("a value", ["a value"], {"a": "value"}, -1):
            body = prompt | {field: value}
            async with server.session.post(server.url + path, json=body, headers=headers) as response:
                text = await response.text()
                assert response.status in (200, 400, 404), text
                assert response.status == 200 or CANARY not in text, (field, text)
    status, text = await server.get("/metrics", headers=headers)
    assert (status, CANARY in text) == (200, False)
    for path_, text in [
        (p, (await server.get(p, headers=headers))[1]) for p in ("/ready", "/openapi.json", "/version")
    ]:
        assert CANARY not in text, path_
    for record in caplog.records:
        assert CANARY not in logging.Formatter("%(name)s %(message)s").format(record)


async def test_messages_to_callers_are_short_and_printable(server):
    status, answer = await server.post(COMPLETIONS, {"prompt": "x", "model": "m\n\x1b" * 4000})
    assert status == 404
    assert len(answer["error"]["message"]) < 300
    assert answer["error"]["message"].isprintable()


async def test_a_broken_head_is_logged_without_its_bytes(server, caplog):
    heads = (
        f"GET /{CANARY}\x01 HTTP/1.1\r\n\r\n",
        f"GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CANARY}\x01\r\n\r\n",
        f"GET /live HTTP/1.1\r\nHost: x\r\n{CANARY} {CANARY}\r\n\r\n",
    )
    for head in heads:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
        writer.write(head.encode())
        assert b" 400 " in await reader.readline()
        writer.close()
    assert len(caplog.records) == len(heads)
    for record in caplog.records:
        text = logging.Formatter("%(name)s %(message)s").format(record)
        assert "Error handling request" in text
        assert CANARY not in text
