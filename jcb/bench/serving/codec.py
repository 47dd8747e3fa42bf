"""Text to token ids and back, by a tokenizer on this machine or by the server under test itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import aiohttp


class Codec(Protocol):
    """What making prompts of a length needs."""

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, ids: list[int]) -> str: ...


class LocalCodec:
    """A tokenizer.json in a folder, a GGUF file, or the default model's."""

    def __init__(self, path: str) -> None:
        """Raises ModelLoadError, or ValueError when there is no such thing."""
        from jcb.checkpoint.default_model import default_model_path
        from jcb.checkpoint.reader import open_checkpoint
        from jcb.text.tokenizer import load_tokenizer

        place = Path(default_model_path() if path == "default" else path).expanduser()
        if not place.exists():
            raise ValueError(f"--tokenizer {path!r}: there is no such file or folder")
        if (place / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            pipeline = Tokenizer.from_file(str(place / "tokenizer.json"))
            self._encode = lambda text: pipeline.encode(text, add_special_tokens=False).ids
            self._decode = lambda ids: pipeline.decode(ids, skip_special_tokens=False)
        else:
            tokenizer = load_tokenizer(open_checkpoint(place))
            self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
            self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    async def encode(self, text: str) -> list[int]:
        return self._encode(text)

    async def decode(self, ids: list[int]) -> str:
        return self._decode(ids)


class RemoteCodec:
    """The server's own /tokenize and /detokenize, as vLLM and jcb have them."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, model: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._session, self._url, self._model, self._headers = session, base_url, model, headers

    async def encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return (await self._ask("/tokenize", body))["tokens"]

    async def decode(self, ids: list[int]) -> str:
        return (await self._ask("/detokenize", {"model": self._model, "tokens": ids}))["prompt"]

    async def _ask(self, path: str, body: dict) -> dict:
        async with self._session.post(self._url + path, json=body, headers=self._headers) as response:
            if response.status != 200:
                raise ValueError(
                    f"{self._url}{path} answers {response.status}, so prompts cannot be cut to their length: give "
                    "--tokenizer, a folder with a tokenizer.json or a GGUF file"
                )
            return await response.json()
