"""What HTTP costs: the same load through the engine in this process and through a server, in turn.

python -m jcb.bench.serving.http_cost [--streams 64] [--input-len 128] [--output-len 32] [--rounds 5] [--set KEY=VALUE]

Both engines have the same configuration and no prefix cache; the one that is not measured sleeps. Every round has
prompts of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from jcb import config_file
from jcb.bench.offline import Generator, random_prompt, throughput
from jcb.bench.server_process import metric, model_id, serving
from jcb.bench.serving.client import make_body, send
from jcb.bench.spread import spread
from jcb.config import ServeConfig

Prompts = list[list[int]]


async def through_http(url: str, model: str, prompts: Prompts, output_len: int) -> float:
    """Output tokens a second of all prompts streamed at once; RuntimeError for one that failed."""
    fields: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0}
    bodies = [make_body("openai", model, "", output_len, fields | {"prompt": ids}) for ids in prompts]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=3600)) as session:
        began = time.perf_counter()
        sent = [send(session, f"{url}/v1/completions", body, len(body["prompt"])) for body in bodies]
        outcomes = await asyncio.gather(*sent)
        seconds = time.perf_counter() - began
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(outcomes)} requests failed, the first with {errors[0]}")
    return sum(outcome.output_tokens for outcome in outcomes) / seconds


def measure(
    llm: Generator, url: str, *, vocab_size: int, streams: int, input_len: int, output_len: int, rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Tokens a second of both ways, round after round, and the share that HTTP costs: [median, least, most]."""
    rng, model = random.Random(0), model_id(url)
    offline, http = [], []
    for number in range(rounds + 1):
        prompts = [[random_prompt(rng, input_len, vocab_size) for _ in range(streams)] for _ in range(2)]
        result = throughput(llm, [(prompt, output_len) for prompt in prompts[0]])
        direct = result["total_output_tokens"] / result["elapsed_time"]
        served = asyncio.run(through_http(url, model, prompts[1], output_len))
        say(f"  {'warm-up' if not number else f'round {number}'}: offline {direct:.1f}, HTTP {served:.1f} tokens/s")
        if number:
            offline.append(direct)
            http.append(served)
    cost = [100 * (1 - b / a) for a, b in zip(offline, http, strict=True)]
    return {"streams": streams, "offline": spread(offline), "http": spread(http), "cost_percent": spread(cost)}


def main(arguments: list[str] | None = None) -> int:
    """Loads both engines, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.serving.http_cost", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="prompts at once")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both engines")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there as JSON")
    flags = parser.parse_args(arguments)
    if min(flags.streams, flags.input_len, flags.output_len, flags.rounds) < 1:
        parser.error("every number must be at least 1")
    settings = [
        f"scheduler.max_num_seqs={flags.streams}", f"scheduler.max_model_len={flags.input_len + flags.output_len}",
        "cache.enable_prefix_caching=false", "cache.memory_gib=1.0", *flags.set,
    ]  # fmt: skip
    from jcb.engine.llm import LLM

    print("loading the engine in this process ...", flush=True)
    llm = LLM(config=config_file.override(ServeConfig(), config_file.parse_settings(settings)))
    print("starting the server ...", flush=True)
    with serving([part for each in settings for part in ("--set", each)]) as url:
        figures = measure(
            llm, url, vocab_size=llm.engine.info.vocab_size, streams=flags.streams, input_len=flags.input_len,
            output_len=flags.output_len, rounds=flags.rounds, say=print,
        )  # fmt: skip
        asked, padding = metric(url, "jcb:bucket_tokens_total"), metric(url, "jcb:bucket_padding_total")
        figures["padding_ratio"] = (asked + padding) / asked
    print(f"the server computed {figures['padding_ratio']:.3f} x the tokens asked for")
    for name in ("offline", "http", "cost_percent"):
        median, least, most = figures[name]
        print(f"{name:<14}{median:>10.1f}  ({least:.1f} … {most:.1f})")
    if flags.output is not None:
        flags.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
