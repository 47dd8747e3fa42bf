"""Log-probabilities in the three shapes clients read: completions', chat's, and vLLM's for prompts.

The chosen token carries the very number that it has among the alternatives, so a client may compare them
for equality; minus infinity, which JSON cannot say, becomes -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jcb.text.tokenizer import Tokenizer
from jcb.types import Logprobs

LOWEST = -9999.0


class CompletionLogprobs:
    """Builds {tokens, token_logprobs, top_logprobs, text_offset} piece by piece, offsets running on.

    `tokens` joined give the text; `top_logprobs` is keyed by strings that no two tokens share.
    as_ids: tokens go by names like "token_id:17" instead.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._name = id_name if as_ids else tokenizer.token_text
        self._key = id_name if as_ids else tokenizer.token_key
        self._top = top
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> dict[str, list[Any]]:
        """The echoed prompt: its first token has no probability."""
        return self._piece(token_ids, [None, *entries[: len(token_ids) - 1]])

    def output(self, entries: Sequence[Logprobs]) -> dict[str, list[Any]]:
        """Generated tokens."""
        return self._piece([entry.token_id for entry in entries], entries)

    def _piece(self, token_ids: Sequence[int], entries: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        piece: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._tokenizer.token_text(token_id)
            piece["tokens"].append(self._name(token_id))
            piece["text_offset"].append(self._offset)
            self._offset += len(text)
            piece["token_logprobs"].append(None if entry is None else chosen_logprob(entry))
            piece["top_logprobs"].append(None if entry is None else self._alternatives(entry))
        return piece

    def _alternatives(self, entry: Logprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token_id, logprob in _ranked(entry, self._top):
            best[self._key(token_id)] = max(logprob, LOWEST)
        best[self._key(entry.token_id)] = chosen_logprob(entry)
        return best


def join_pieces(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several increments as one."""
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}


def chat_content(
    tokenizer: Tokenizer, entries: Sequence[Logprobs], top: int, name: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Chat's `logprobs.content`: bytes tell how a character split over tokens is made up.

    name: what a token goes by.
    """

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}

    return [
        {
            **token(entry.token_id, chosen_logprob(entry)),
            "top_logprobs": [token(i, max(logprob, LOWEST)) for i, logprob in _ranked(entry, top)],
        }
        for entry in entries
    ]


def id_name(token_id: int) -> str:
    """vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    tokenizer: Tokenizer, num_tokens: int, entries: Sequence[Logprobs], top: int
) -> list[dict[str, Any] | None]:
    """The shape of vLLM: null, then for each prompt token {id: {logprob, rank, decoded_token}}."""
    rows: list[dict[str, Any] | None] = [None]
    for entry in entries[: num_tokens - 1]:
        row: dict[str, Any] = {}
        for rank, (token_id, logprob) in enumerate(_ranked(entry, top), 1):
            row[str(token_id)] = _vllm_token(tokenizer, token_id, max(logprob, LOWEST), rank)
        if str(entry.token_id) not in row:
            row[str(entry.token_id)] = _vllm_token(tokenizer, entry.token_id, chosen_logprob(entry), None)
        rows.append(row)
    return rows


def chosen_logprob(entry: Logprobs) -> float:
    """The chosen token's number, taken from the alternatives where it is among them."""
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        if token_id == entry.token_id:
            return max(logprob, LOWEST)
    return max(entry.logprob, LOWEST)


def _ranked(entry: Logprobs, top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True))


def _vllm_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
