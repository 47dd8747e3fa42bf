"""The official client, as people use it: in its own thread, over a real socket."""

import asyncio

import openai
import pytest

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
