"""Clients as people use them, against the default model: not one error. `make test-clients` installs and runs them."""

import json
import os
import subprocess
from pathlib import Path

import openai
import pydantic
import pytest

from tests.clients.conftest import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
SCRIPTS = Path(__file__).parent


class City(pydantic.BaseModel):
    city: str
    is_capital: bool


@pytest.fixture
def client(target):
    with openai.OpenAI(base_url=target.url + "/v1", api_key=target.key, max_retries=0) as made:
        yield made


def test_openai_for_python(target, client):
    chat = client.chat.completions
    common = {"model": target.model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}
    whole = chat.create(**common, logprobs=True, top_logprobs=3)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(chat.create(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with chat.stream(**common) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    raw = chat.with_raw_response.create(**common, extra_headers={"X-Request-Id": "abc"})
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse().choices[0].message.content == whole.choices[0].message.content
    parsed = chat.parse(**common | {"max_completion_tokens": 60}, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert client.responses.create(model=target.model, input="Hi", max_output_tokens=8).output_text
    pieces = client.completions.create(model=target.model, prompt=["One", "Two"], max_tokens=4, stream=True)
    assert {piece.choices[0].index for piece in pieces} == {0, 1}


async def test_openai_for_python_asynchronously(target):
    async with openai.AsyncOpenAI(base_url=target.url + "/v1", api_key=target.key, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=target.model, messages=MESSAGES, temperature=0, max_tokens=8, stream=True
        )
        assert "Paris" in "".join([c.choices[0].delta.content or "" async for c in stream])


def test_openai_errors_are_typed(target, client):
    for arguments, kind in (
        ({"temperature": 99}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": target.model, "messages": MESSAGES} | arguments)
        assert caught.value.code
        assert caught.value.body["message"]
    with (
        openai.OpenAI(base_url=target.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_for_node(target):
    folder = CLIENTS / "node"
    if not (folder / "node_modules" / "openai").exists():
        pytest.skip("openai for Node is not installed: make test-clients")
    script = folder / "client.mjs"
    script.write_text((SCRIPTS / "client.mjs").read_text())
    environment = os.environ | {"JCB_URL": target.url, "JCB_MODEL": target.model, "OPENAI_API_KEY": target.key}
    done = subprocess.run(
        ["node", script], capture_output=True, text=True, timeout=300, env=environment, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert "Paris" in found["whole"]
    assert found["streamed"] == found["whole"]
    assert found["errors"] == ["BadRequestError", "NotFoundError", "AuthenticationError"]


LITELLM = """
import os, litellm
common = dict(model="hosted_vllm/" + os.environ["JCB_MODEL"], api_base=os.environ["JCB_URL"] + "/v1",
              api_key=os.environ["OPENAI_API_KEY"], temperature=0, max_tokens=8,
              messages=[{"role": "user", "content": "What is the capital of France? Answer in one word."}])
whole = litellm.completion(**common)
streamed = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**common, stream=True))
assert whole.choices[0].message.content == streamed, (whole, streamed)
assert whole.usage.completion_tokens > 0
try:
    litellm.completion(**common | {"temperature": 99})
except litellm.BadRequestError:
    print("refused:", streamed)
"""


def test_litellm(run):
    assert "refused:" in run("litellm", "python", "-", text=LITELLM)


LANGCHAIN = """
import os
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model=os.environ["JCB_MODEL"], base_url=os.environ["JCB_URL"] + "/v1", temperature=0, max_tokens=8,
                  stream_usage=True)
answer = chat.invoke("What is the capital of France? Answer in one word.")
assert answer.usage_metadata["output_tokens"] > 0, answer
assert "cache_read" in answer.usage_metadata["input_token_details"], answer
streamed = "".join(chunk.content for chunk in chat.stream("What is the capital of France? Answer in one word."))
assert streamed == answer.content, (streamed, answer)
print("answered:", streamed)
"""


def test_langchain(run):
    assert "answered:" in run("langchain", "python", "-", text=LANGCHAIN)


def test_llm(run, target, tmp_path):
    settings = tmp_path / "llm"
    settings.mkdir()
    (settings / "extra-openai-models.yaml").write_text(
        f"- model_id: jcb\n  model_name: {target.model}\n  api_base: {target.url}/v1\n  api_key_name: jcb\n"
    )
    question = "What is the capital of France? Answer in one word."
    for extra in ((), ("--no-stream",)):
        options = ("-m", "jcb", "-o", "temperature", "0", "-o", "max_tokens", "8", "--key", target.key, *extra)
        assert "Paris" in run("llm", "llm", "prompt", question, *options, LLM_USER_PATH=str(settings))


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
CHOICES = 'doc_to_choice: ["Paris", "London", "Rome"]\nmetric_list: [{metric: acc}]'
GENERATE = (
    "generation_kwargs: {until: ['\\n', '.', ',', '!', '?'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]"
)


@pytest.mark.parametrize(
    ("model", "path", "kind", "rest"),
    [
        ("local-completions", "/v1/completions", "multiple_choice", CHOICES),
        ("local-completions", "/v1/completions", "generate_until", GENERATE),
        ("local-chat-completions", "/v1/chat/completions", "generate_until", GENERATE),
    ],
)
def test_lm_eval(run, target, tmp_path, model, path, kind, rest):
    data = tmp_path / "data.jsonl"
    rows = [
        {"question": "The capital of France is", "answer": "Paris"},
        {"question": "The capital of the United Kingdom is", "answer": "London"},
        {"question": "The capital of Italy is", "answer": "Rome"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"cities_{kind}"
    (tmp_path / "task.yaml").write_text(TASK.format(name=name, data=data, kind=kind, rest=rest))
    arguments = f"base_url={target.url}{path},model={target.model},num_concurrent=2,max_length=1024"
    arguments += f",tokenizer_backend=remote,auth_token={target.key}" if model == "local-completions" else ""
    command = ["lm_eval", "run", "--model", model, "--model_args", arguments, "--include_path", str(tmp_path)]
    command += ["--tasks", name, *(["--apply_chat_template"] if "chat" in model else [])]
    output = run("lm-eval", *command, timeout=600)
    assert name in output
    if kind == "multiple_choice":
        found = next(line for line in output.splitlines() if "|acc" in line)
        assert float(found.split("|")[7]) == 1.0, output[-2000:]


def test_guidellm(run, target, tmp_path):
    backend = f"kind=openai_http,target={target.url},request_format=/v1/chat/completions,model={target.model}"
    backend += f",api_key={target.key}"
    before = target.metric("jcb:request_success_total")
    run(
        "guidellm", "guidellm", "run", "--backend", backend, "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=12", "--tokenizer", f"kind=hf_auto,model={target.tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", timeout=600,
    )  # fmt: skip
    assert target.metric("jcb:request_success_total") - before >= 12
