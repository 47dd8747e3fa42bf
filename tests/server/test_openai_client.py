"""The official client, as people use it: in its own thread, over a real socket."""

import asyncio

import openai
import pytest

from jcb.config import ServerConfig

MESSAGES = [{"role": "user", "content": "Hello"}]


async def in_thread(server, use):
    def run():
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_sync_client(server):
    def use(client):
        model = client.models.list().data[0].id
        assert client.models.retrieve(model).id == model
        whole = client.chat.completions.create(
            model=model, messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
        stream = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_completion_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        completion = client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0, logprobs=2)
        assert completion.choices[0].logprobs.tokens
        pieces = client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0, stream=True)
        assert "".join(c.choices[0].text for c in pieces) == completion.choices[0].text

    await in_thread(server, use)


async def test_async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        whole = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=8, temperature=0, extra_body={"top_k": 5, "ignore_eos": True}
        )
        assert whole.usage.completion_tokens == 8
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == whole.choices[0].message.content
        pieces = await client.completions.create(model=model, prompt=[[104], [105]], max_tokens=4, stream=True)
        assert {c.choices[0].index async for c in pieces} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"temperature": 99}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ],
)
async def test_b115_errors_are_typed_and_have_text(server, arguments, kind):
    def use(client):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": server.service.model_name, "messages": MESSAGES} | arguments)
        assert caught.value.body["message"]
        assert caught.value.code

    await in_thread(server, use)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(kind):
            await client.chat.completions.create(
                **{"model": server.service.model_name, "messages": MESSAGES} | arguments
            )


async def test_an_error_in_a_stream_reaches_the_caller(start_server):
    server = await start_server()
    server.executor.not_finite = lambda row: row.num_output == 3

    def use(client):
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.completions.create(model="fake", prompt="x", stream=True, max_tokens=9))

    await in_thread(server, use)


async def test_b115_refusals_of_the_server_are_typed_too(start_server, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("none\n")
    server = await start_server(server=ServerConfig(port=0, api_key_file=str(keys)), max_num_seqs=1, max_queued=1)
    server.executor.step_seconds = 0.05
    arguments = {"model": "fake", "prompt": "x", "max_tokens": 60, "extra_body": {"ignore_eos": True}}

    def stranger():
        with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        busy = []
        for _ in range(2):  # one in the slot, one behind it
            busy.append(asyncio.create_task(client.completions.create(**arguments)))
            await asyncio.sleep(0.2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**arguments)
        assert (caught.value.code, caught.value.response.headers["Retry-After"]) == ("queue_full", "1")
        await asyncio.to_thread(stranger)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**arguments | {"prompt": "x" * (4 << 20)})
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        draining = asyncio.create_task(server.async_engine.drain(0.1))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**arguments)
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        await draining
        ended = await asyncio.gather(*busy, return_exceptions=True)
        assert all(isinstance(error, openai.InternalServerError) for error in ended)
    await server.settle()


async def test_raw_responses_and_the_stream_helper(server):
    def use(client):
        arguments = {"model": server.service.model_name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        raw = client.chat.completions.with_raw_response.create(**arguments, extra_headers={"X-Request-Id": "mine"})
        assert raw.headers["X-Request-Id"] == "mine"
        with client.chat.completions.stream(**arguments) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == raw.parse().choices[0].message.content

    await in_thread(server, use)
