"""Files of requests that are not what they should be: one clear refusal, whatever is in them."""

import json

import pytest

from jcb.bench.serving.datasets import Dataset


class Letters:
    """A codec with a token a letter."""

    async def encode(self, text):
        return [*text.encode()]

    async def decode(self, ids):
        return bytes(ids).decode()


TURNS = {"conversations": [{"value": "What is it?"}, {"value": "It is this."}]}


async def test_conversations_are_read(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([TURNS, {"conversations": [{"value": "alone"}]}, {}]))
    samples = await Dataset(name="sharegpt", path=str(path)).samples(2, 0, Letters())
    assert [(sample.prompt, sample.output_tokens) for sample in samples] == [("What is it?", 11)] * 2


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"\xff",
        b"",
        b"null",
        b"5",
        b"[1]",
        *[
            json.dumps([{"conversations": each}]).encode()
            for each in (5, "xx", {}, [1, 2], [{}, {}], [{"value": 1}, {"value": 2}], [{"value": "a"}, {"value": None}])
        ],
    ],
    ids=lambda text: str(text[:50]),
)
async def test_what_is_no_file_of_conversations_is_told(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"d\.json"):
        await Dataset(name="sharegpt", path=str(path)).samples(2, 0, Letters())


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"\xff",
        b"5",
        b'{"prompt": 5, "output_tokens": 1}',
        b'{"prompt": "x", "output_tokens": -1}',
        b'{"prompt": "x", "output_tokens": true}',
        b'{"prompt": "x", "output_tokens": NaN}',
        b'{"prompt": "x", "output_tokens": 1' + b"0" * 1000 + b"}",
    ],
    ids=lambda text: str(text[:50]),
)
async def test_what_is_no_file_of_prompts_is_told_with_its_line(tmp_path, text):
    path = tmp_path / "d.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"d\.jsonl") as caught:
        await Dataset(name="custom", path=str(path)).samples(2, 0, Letters())
    assert len(str(caught.value)) < 500
