"""A process that tries grammars out, so that none of them can hurt the server: `python -m jcb.structured.worker`.

The first line of its input is the vocabulary, each further line a `Structured`; it answers each with one line. It ends
with its input, or by itself when one grammar takes too long or too much memory.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from jcb.structured.grammar import CompiledGrammar, GrammarError, plain, translate, try_out
from jcb.structured.vocab import Vocab, make_tokenizer
from jcb.types import Structured

MAX_GROWTH = 64 << 20
"""Bytes that it may have kept of earlier grammars; with more it asks to be replaced."""


def main() -> None:
    """Answers until the input ends."""
    head = json.loads(sys.stdin.readline())
    pieces = [piece.encode("latin-1") for piece in head["pieces"]]
    vocab = Vocab(pieces, head["special_ids"], head["end_ids"])
    tokenizer = make_tokenizer(vocab)
    size = _size()
    _limit_memory(size + head["memory_bytes"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        _end_in(head["seconds"] + 1)  # for a server that has died meanwhile
        answer = _answer(tokenizer, vocab, Structured(**json.loads(line)))
        _end_in(0)
        print(json.dumps(answer | {"is_worn": _size() > size + MAX_GROWTH}), flush=True)


def _answer(tokenizer: Any, vocab: Vocab, structured: Structured) -> dict[str, Any]:
    """{"grammar": what `CompiledGrammar` takes}, or {"error": why it is refused}."""
    try:
        grammar = translate(structured)
        try_out(CompiledGrammar(tokenizer, vocab, grammar, structured.param))
    except (GrammarError, ValueError) as error:
        return {"error": plain(str(error))}
    except MemoryError:
        return {"error": "it needs too much memory"}
    return {"grammar": grammar}


def _end_in(seconds: int) -> None:
    """Lets the system end the process then, where it can; 0: never."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _size() -> int:
    """Bytes of address space in use, 0 where the system does not tell."""
    try:
        import resource

        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return 0


def _limit_memory(size: int) -> None:
    """Allows `size` bytes of address space, where the system can be told."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
