"""The commands under `jcb bench`: their flags; those of serve, throughput and latency are named as vLLM's are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from jcb.cli_options import EngineOptions

_NONE = "(default: none)"


@dataclass(frozen=True, kw_only=True)
class BenchKernels:
    """Time the kernels on the device at hand: named shapes × implementations, against its measured roofline."""

    case: Annotated[str, arg(help="shapes whose name contains this", metavar="TEXT", help_behavior_hint="")] = ""
    implementation: Annotated[str, arg(help="cpu, gpu, tpu, xla, reference", help_behavior_hint="(default: all)")] = ""
    dtype: Annotated[str, arg(help="of queries and cache", help_behavior_hint="(default: the device's own)")] = ""
    repeat: Annotated[int, arg(help="measurements of each; their median counts")] = 5
    tune: Annotated[
        bool, FlagCreatePairsOff, arg(help="try every tile size and write tuned.json", help_behavior_hint="")
    ] = False
    output: Annotated[
        Path | None, arg(help="file for JSON results, or for --tune's choices", metavar="FILE", help_behavior_hint="")
    ] = None

    def run(self) -> int:
        """Prints a table."""
        from jcb.bench import kernels

        return kernels.run(
            case=self.case,
            implementation=self.implementation,
            dtype=self.dtype,
            repeat=self.repeat,
            tune_blocks=self.tune,
            output=self.output,
        )


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What is asked."""

    dataset_name: Annotated[Literal["random", "sharegpt", "custom"], arg(help="where prompts come from")] = "random"
    dataset_path: Annotated[
        str, arg(help="ShareGPT's JSON, or JSON lines with prompt (and output_tokens)", metavar="FILE")
    ] = ""
    num_prompts: Annotated[int, arg(help="requests to send")] = 1000
    seed: Annotated[int, arg(help="the same seed draws the same prompts, lengths and gaps")] = 0
    disable_shuffle: Annotated[bool, FlagCreatePairsOff, arg(help="keep a file's order", help_behavior_hint="")] = False
    no_oversample: Annotated[
        bool, FlagCreatePairsOff, arg(help="send fewer when the file is too short", help_behavior_hint="")
    ] = False
    random_prefix_len: Annotated[int, arg(help="tokens all prompts share, before their own")] = 0
    random_range_ratio: Annotated[float, arg(help="lengths vary evenly by this part, both ways")] = 0.0
    sharegpt_output_len: Annotated[
        int | None, arg(help="tokens to ask for in place of the answer's", help_behavior_hint=_NONE, metavar="INT")
    ] = None
    custom_output_len: Annotated[int, arg(help="tokens to ask for; -1 takes the file's output_tokens")] = 256

    def dataset(self, input_len: int, output_len: int) -> Any:
        """The Dataset that these options describe; ValueError names what is wrong."""
        from jcb.bench.serving.datasets import Dataset

        custom = None if self.custom_output_len == -1 else self.custom_output_len
        return Dataset(
            name=self.dataset_name,
            path=self.dataset_path,
            input_len=input_len,
            output_len=output_len,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
            output_override={"sharegpt": self.sharegpt_output_len, "custom": custom}.get(self.dataset_name),
            shuffle=not self.disable_shuffle,
            oversample=not self.no_oversample,
        )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Request fields; those not given are not sent."""

    temperature: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    top_p: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    top_k: Annotated[int | None, arg(help="sent with every request", metavar="INT")] = None
    min_p: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    frequency_penalty: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    presence_penalty: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    repetition_penalty: Annotated[float | None, arg(help="sent with every request", metavar="FLOAT")] = None
    logprobs: Annotated[int | None, arg(help="log-probabilities a token to ask for", metavar="INT")] = None
    ignore_eos: Annotated[
        bool, FlagCreatePairsOff, arg(help="answers run to their full length", help_behavior_hint="")
    ] = False
    extra_body: Annotated[str, arg(help="JSON object of more request fields", metavar="JSON")] = ""

    def fields(self, backend: str) -> dict[str, Any]:
        """The request fields; ValueError when the JSON is none."""
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
        given = {name: getattr(self, name) for name in (*names, "repetition_penalty")}
        fields = {name: value for name, value in given.items() if value is not None}
        if self.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": self.logprobs}
            fields |= chat if backend == "openai-chat" else {"logprobs": self.logprobs}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ValueError(f"--extra-body {self.extra_body!r} is not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ValueError(f"--extra-body {self.extra_body!r} must be a JSON object")
        return fields | extra


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """What is counted and kept."""

    percentile_metrics: Annotated[
        str, arg(help="of ttft, tpot, itl, e2el, client_queue_time, commas between", metavar="NAMES")
    ] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, arg(help="percentiles to show, commas between", metavar="NUMBERS")] = "99"
    goodput: Annotated[
        tuple[str, ...], arg(help="goals in ms, as in ttft:500 tpot:40 e2el:9000", metavar="KEY:VALUE")
    ] = ()
    save_result: Annotated[bool, FlagCreatePairsOff, arg(help="write the figures as JSON", help_behavior_hint="")] = (
        False
    )
    save_detailed: Annotated[
        bool, FlagCreatePairsOff, arg(help="with one entry a request in it", help_behavior_hint="")
    ] = False
    append_result: Annotated[
        bool, FlagCreatePairsOff, arg(help="add to the file, a line a run", help_behavior_hint="")
    ] = False
    result_dir: Annotated[str, arg(help="folder for the result", metavar="FOLDER")] = ""
    result_filename: Annotated[str, arg(help="name of the file", metavar="NAME")] = ""
    label: Annotated[str, arg(help="begins the file's name", help_behavior_hint="(default: the backend)")] = ""
    metadata: Annotated[tuple[str, ...], arg(help="more for the JSON, as in version=1", metavar="KEY=VALUE")] = ()

    def saving(self) -> Any:
        """The Saving that these options describe."""
        from jcb.bench.serving.run import Saving

        return Saving(
            is_wanted=self.save_result or self.append_result,
            details=self.save_detailed,
            append=self.append_result,
            folder=self.result_dir,
            filename=self.result_filename,
            label=self.label,
            metadata=_pairs("--metadata", self.metadata),
        )


@dataclass(frozen=True, kw_only=True)
class BenchServe(SavingOptions, SampleOptions, DatasetOptions):
    """Send requests to a server that speaks OpenAI's API; flags, lines and JSON keys as of `vllm bench serve`."""

    backend: Annotated[Literal["openai", "openai-chat"], arg(help="completions or chat completions")] = "openai"
    base_url: Annotated[str, arg(help="the server", help_behavior_hint="(default: http://HOST:PORT)")] = ""
    host: Annotated[str, arg(help="the server's address")] = "127.0.0.1"
    port: Annotated[int, arg(help="the server's port")] = 8000
    endpoint: Annotated[str, arg(help="path of the API", help_behavior_hint="(default: the backend's)")] = ""
    header: Annotated[tuple[str, ...], arg(help="more headers, as in x-team=a", metavar="KEY=VALUE")] = ()
    model: Annotated[str, arg(help="the model's name", help_behavior_hint="(default: the server's first)")] = ""
    served_model_name: Annotated[str, arg(help="the name to send", help_behavior_hint="(default: --model)")] = ""
    tokenizer: Annotated[
        str, arg(help='folder with a tokenizer.json, GGUF file or "default"', help_behavior_hint="(default: /tokenize)")
    ] = ""
    random_input_len: Annotated[int, arg(help="tokens of a random prompt")] = 1024
    random_output_len: Annotated[int, arg(help="tokens to ask for")] = 128
    request_rate: Annotated[float, arg(help="requests a second; inf sends all at once")] = math.inf
    burstiness: Annotated[float, arg(help="1 is Poisson, below 1 comes in bursts, above is evener")] = 1.0
    max_concurrency: Annotated[int | None, arg(help="most requests under way", metavar="INT")] = None
    ramp_up_strategy: Annotated[Literal["linear", "exponential"] | None, arg(help="how the rate rises")] = None
    ramp_up_start_rps: Annotated[float, arg(help="rate at the first request")] = 0.0
    ramp_up_end_rps: Annotated[float, arg(help="rate at the last request")] = 0.0
    num_warmups: Annotated[int, arg(help="requests before the clock starts")] = 0
    ready_check_timeout_sec: Annotated[float, arg(help="seconds to wait for a first answer; 0: no check")] = 0.0
    request_id_prefix: Annotated[str, arg(help="send X-Request-Id with this before a number")] = ""
    profile: Annotated[bool, FlagCreatePairsOff, arg(help="have the server profile the run", help_behavior_hint="")] = (
        False
    )
    disable_tqdm: Annotated[bool, FlagCreatePairsOff, arg(help="show no progress", help_behavior_hint="")] = False

    def run(self) -> int:
        """Prints the figures; status 1 when no request succeeded."""
        import asyncio

        from jcb import terminal
        from jcb.bench.serving.arrivals import Arrivals
        from jcb.bench.serving.figures import Wanted
        from jcb.bench.serving.run import Load, Target, benchmark, default_headers

        target = Target(
            backend=self.backend,
            base_url=self.base_url or f"http://{self.host}:{self.port}",
            endpoint=self.endpoint,
            model=self.model,
            served_model_name=self.served_model_name,
            tokenizer=self.tokenizer,
            headers=default_headers() | _pairs("--header", self.header),
            fields=self.fields(self.backend),
            ready_seconds=self.ready_check_timeout_sec,
        )
        arrivals = Arrivals(
            self.request_rate, self.burstiness, self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps
        )
        load = Load(
            num_prompts=self.num_prompts,
            max_concurrency=self.max_concurrency,
            num_warmups=self.num_warmups,
            seed=self.seed,
            request_id_prefix=self.request_id_prefix,
            profile=self.profile,
        )
        wanted = Wanted.parse(self.percentile_metrics, self.metric_percentiles, self.goodput)
        dataset = self.dataset(self.random_input_len, self.random_output_len)
        with terminal.load_progress() as progress:
            run = benchmark(
                target, dataset, arrivals, load, wanted, self.saving(),
                progress=None if self.disable_tqdm else progress,
            )  # fmt: skip
            result = asyncio.run(run)
        return 0 if result["completed"] else 1


@dataclass(frozen=True, kw_only=True)
class BenchThroughput(DatasetOptions, EngineOptions):
    """All requests at once through the engine, no server; flags, lines and JSON keys as of `vllm bench throughput`."""

    seed: Annotated[int, arg(help="the same seed draws the same prompts and answers")] = 0
    input_len: Annotated[int, arg(help="tokens of a random prompt")] = 1024
    output_len: Annotated[int, arg(help="tokens to write")] = 128
    n: Annotated[int, arg(help="answers to each prompt")] = 1
    output_json: Annotated[Path | None, arg(help="file for the figures", metavar="FILE", help_behavior_hint=_NONE)] = (
        None
    )

    def run(self) -> int:
        """Prints requests and tokens a second."""
        import asyncio

        from jcb.bench import offline

        dataset = self.dataset(self.input_len, self.output_len)
        llm = _llm(self)
        vocab = llm.engine.tokenizer.vocab_size
        requests = asyncio.run(
            offline.throughput_requests(dataset, self.num_prompts, self.seed, vocab, llm.engine.config.model)
        )
        result = offline.throughput(llm, requests, n=self.n, progress=True)
        offline.report(result, offline.throughput_lines(result), self.output_json)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchLatency(EngineOptions):
    """One batch after another through the engine, no server; flags, lines and JSON keys as of `vllm bench latency`."""

    seed: Annotated[int, arg(help="the same seed draws the same prompts and answers")] = 0
    input_len: Annotated[int, arg(help="tokens of each prompt")] = 32
    output_len: Annotated[int, arg(help="tokens to write")] = 128
    batch_size: Annotated[int, arg(help="prompts at once")] = 8
    n: Annotated[int, arg(help="answers to each prompt")] = 1
    num_iters_warmup: Annotated[int, arg(help="batches before the clock starts")] = 10
    num_iters: Annotated[int, arg(help="batches that count")] = 30
    output_json: Annotated[Path | None, arg(help="file for the figures", metavar="FILE", help_behavior_hint=_NONE)] = (
        None
    )

    def run(self) -> int:
        """Prints the mean and the percentiles of a batch's seconds."""
        import random

        from jcb import terminal
        from jcb.bench import offline

        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        llm = _llm(self)
        rng, vocab = random.Random(self.seed), llm.engine.tokenizer.vocab_size
        prompts = [offline.random_prompt(rng, self.input_len, vocab) for _ in range(self.batch_size)]
        with terminal.load_progress() as progress:
            result = offline.latency(
                llm, prompts, output_len=self.output_len, n=self.n, warmups=self.num_iters_warmup,
                iterations=self.num_iters, show=progress,
            )  # fmt: skip
        offline.report(result, offline.latency_lines(result), self.output_json)
        return 0


def _llm(options: EngineOptions) -> Any:
    """The engine of `options`, loaded with progress shown."""
    from jcb import terminal
    from jcb.engine.llm import LLM

    with terminal.load_progress() as progress:
        return LLM(config=options.serve_config(), progress=progress)


def _pairs(flag: str, texts: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE texts as a mapping; ValueError names one that is not."""
    for text in texts:
        if "=" not in text:
            raise ValueError(f"{flag} {text!r} is not of the form KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


BENCHES: dict[str, Any] = {
    "serve": BenchServe,
    "throughput": BenchThroughput,
    "latency": BenchLatency,
    "kernels": BenchKernels,
}
