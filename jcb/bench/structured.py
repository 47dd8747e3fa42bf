"""What rows with a grammar cost the rows without one: `make bench-structured`.

Some free rows are timed in three batches, in turn: beside as many free mates, beside as many mates that follow
grammars, and alone. Everything is in one process, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import uuid

from jcb.bench.spread import spread
from jcb.engine.admission import make_requests
from jcb.engine.llm import LLM
from jcb.types import FinishReason, Grammar, Request, SamplingParams, Structured

SCHEMA = {
    "type": "array",
    "minItems": 400,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer"},
            "tags": {"enum": [1, 2]},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
MATES = (Structured(kind="json", source=json.dumps(SCHEMA)), Structured(kind="regex", source="([a-z]{2,9}[ ,.]){999}"))


def main() -> None:
    """Prints a line a round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, default=8, help="free rows that are timed, and as many mates")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each timed row")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, max_num_seqs=2 * options.rows, max_num_batched_tokens=64, max_model_len=2048)
    rates: dict[str, list[float]] = {"free mates": [], "guided mates": [], "alone": []}
    for number in range(options.rounds + 1):
        for kind, found in rates.items():
            rate = _rate(llm, options.rows, options.tokens, kind)
            if number:  # the first round warms up
                found.append(rate)
        if number:
            print("  ".join(f"{kind}: {found[-1]:7.2f} tokens/s" for kind, found in rates.items()), flush=True)
    for kind in ("free mates", "alone"):
        ratios = [a / b for a, b in zip(rates["guided mates"], rates[kind], strict=True)]
        middle, low, high = spread(ratios)
        print(f"free rows beside guided mates / {kind}: {middle:.3f} ({low:.3f} to {high:.3f})")


def _rate(llm: LLM, rows: int, tokens: int, kind: str) -> float:
    """Tokens a second of the timed rows, once everybody generates."""
    timed = [_request(llm, tokens + 1, None) for _ in range(rows)]
    specs = {"free mates": [None] * rows, "guided mates": [MATES[i % len(MATES)] for i in range(rows)]}.get(kind, [])
    mates = [_request(llm, 1500, structured) for structured in specs]
    core = llm.engine.core
    for request in (*mates, *timed):
        core.add(request)
    left = {request.request_id: tokens + 1 for request in timed}
    begun, start, count = set(), 0.0, 0
    while left:
        for output in core.step():
            assert output.error is None, output.error
            begun.add(output.request_id)
            if not start:
                continue
            count += len(output.token_ids) if output.request_id in left else 0
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH, "a mate ended before the timed rows"
                left.pop(output.request_id)
        if not start and len(begun) == len(timed) + len(mates):
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    for request in mates:
        core.abort(request.request_id, FinishReason.ABORT)
    while core.has_work:
        core.step()
    return count / seconds


def _request(llm: LLM, tokens: int, structured: Structured | None) -> Request:
    prompt = llm.engine.tokenizer.encode("Once upon a time")
    params = SamplingParams(
        max_tokens=tokens, temperature=1.0, seed=random.getrandbits(32), structured=structured, ignore_eos=True
    )
    grammar: Grammar | None = None if structured is None else llm.compile(structured)
    name, rng = uuid.uuid4().hex, random.Random(0)
    return make_requests(prompt, params, model=llm.engine.info, request_id=name, rng=rng, grammar=grammar)[0]


if __name__ == "__main__":
    main()
