"""`jcb bench throughput` and `jcb bench latency`: the engine without a server, with the lines and keys of vLLM's."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jcb.bench.serving.codec import LocalCodec
from jcb.bench.serving.datasets import Dataset, Sample
from jcb.types import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
Say = Callable[[str], None]


class Generator(Protocol):
    """What is needed of `jcb.engine.llm.LLM`."""

    def generate(self, prompts: Any, params: Any, *, progress: bool = ...) -> Sequence[Any]: ...


def random_prompt(rng: random.Random, tokens: int, vocab_size: int) -> list[int]:
    """Token ids drawn evenly from the vocabulary."""
    return [rng.randrange(vocab_size) for _ in range(tokens)]


async def throughput_requests(
    dataset: Dataset, count: int, seed: int, vocab_size: int, tokenizer: str
) -> list[tuple[Any, int]]:
    """(prompt, tokens to write) of `count` requests: ids for the random dataset, texts of a file else."""
    rng = random.Random(seed)
    if dataset.name != "random":
        samples: list[Sample] = await dataset.samples(count, seed, LocalCodec(tokenizer))
        return [(sample.prompt, sample.output_tokens) for sample in samples]
    inputs, outputs = (dataset.lengths(n, count, rng) for n in (dataset.input_len, dataset.output_len))
    prefix = random_prompt(rng, dataset.prefix_len, vocab_size)
    return [(prefix + random_prompt(rng, i, vocab_size), o) for i, o in zip(inputs, outputs, strict=True)]


def throughput(llm: Generator, requests: Sequence[tuple[Any, int]], *, n: int = 1, progress: bool = False) -> dict:
    """All requests at once: elapsed_time, num_requests, total_num_tokens, requests_per_second, tokens_per_second.

    The keys are vLLM's; total_output_tokens is jcb's own. A request that fails raises its error.
    """
    params = [SamplingParams(n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=o) for _, o in requests]
    began = time.perf_counter()
    results = llm.generate([prompt for prompt, _ in requests], params, progress=progress)
    seconds = time.perf_counter() - began
    _raise_errors(results)
    prompt = sum(len(result.prompt_token_ids) for result in results)
    output = sum(len(choice.token_ids) for result in results for choice in result.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompt + output,
        "total_output_tokens": output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompt + output) / seconds,
    }


def throughput_lines(result: dict[str, Any]) -> list[str]:
    """The lines that vLLM's benchmark prints."""
    output = result["total_output_tokens"]
    return [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {output / result['elapsed_time']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_num_tokens'] - output}",
        f"Total num output tokens:  {output}",
    ]


def latency(
    llm: Generator, prompts: Sequence[list[int]], *, output_len: int, n: int, warmups: int, iterations: int,
    show: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of one batch from its start to its end, `iterations` times: avg_latency, latencies, percentiles."""
    params = SamplingParams(n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len)
    latencies = []
    for index in range(warmups + iterations):
        began = time.perf_counter()
        _raise_errors(llm.generate(prompts, params))
        if index >= warmups:
            latencies.append(time.perf_counter() - began)
        if show is not None:
            show("iterations", index + 1, warmups + iterations)
    percentiles = {str(part): float(np.percentile(latencies, part)) for part in PERCENTILES}
    return {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": percentiles}


def latency_lines(result: dict[str, Any]) -> list[str]:
    """The lines that vLLM's benchmark prints."""
    shares = [f"{part}% percentile latency: {value} seconds" for part, value in result["percentiles"].items()]
    return [f"Avg latency: {result['avg_latency']} seconds", *shares]


def report(result: dict[str, Any], texts: Sequence[str], output: Path | None, say: Say = print) -> None:
    """Print the lines; write the JSON where asked for."""
    for text in texts:
        say(text)
    if output is not None:
        output.write_text(json.dumps(result, indent=4) + "\n")
        say(f"wrote {output}")


def _raise_errors(results: Sequence[Any]) -> None:
    for result in results:
        for choice in result.outputs:
            if choice.error is not None:
                raise choice.error
