"""GET /metrics: the engine's numbers as Prometheus text, under our prefix and under vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jcb.metrics import Counter, EngineMetrics, Gauge, Histogram
from jcb.server.service import Service

OURS, VLLM = "jcb", "vllm"

# field of EngineMetrics → (what it tells, label its split has, whether vLLM has it under the same name)
_FIELDS: dict[str, tuple[str, str, bool]] = {
    "num_requests_running": ("Sequences that hold a slot", "", True),
    "num_requests_waiting": ("Sequences that wait for a slot", "", True),
    "kv_cache_usage_perc": ("Part of the pages that sequences use, 0 to 1", "", True),
    "kv_cache_cached_perc": ("Part of the pages that only the prefix cache holds, 0 to 1", "", False),
    "batch_slot_occupancy": ("Rows of the last step by slots, 0 to 1", "", False),
    "model_load_seconds": ("Time from start to ready", "", False),
    "prompt_tokens": ("Prompt tokens of sequences that gave a token", "", True),
    "generation_tokens": ("Tokens generated", "", True),
    "request_success": ("Sequences ended, by reason", "finished_reason", True),
    "request_errors": ("Sequences ended by an error, by status", "status", False),
    "num_preemptions": ("Sequences that gave up their pages", "", True),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "", True),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "", True),
    "admission_rejections": ("Requests refused for want of room", "", True),
    "steps": ("Steps of the loop", "", False),
    "compiles_after_ready": ("Programs compiled after warm-up: 0 unless something is wrong", "", False),
    "compile_seconds": ("Time spent in compiling", "stage", False),
    "time_to_first_token_seconds": ("From arrival to the first token", "", True),
    "inter_token_latency_seconds": ("Between two tokens of a sequence", "", True),
    "request_time_per_output_token_seconds": ("Mean time a token after the first", "", True),
    "e2e_request_latency_seconds": ("From arrival to the end", "", True),
    "request_queue_time_seconds": ("From arrival to the first step", "", True),
    "request_prefill_time_seconds": ("From the first step to the first token", "", True),
    "request_decode_time_seconds": ("From the first token to the end", "", True),
    "request_inference_time_seconds": ("From the first step to the end", "", True),
    "iteration_tokens": ("Tokens a step", "", False),
    "request_prompt_tokens": ("Prompt tokens a sequence", "", True),
    "request_generation_tokens": ("Generated tokens a sequence", "", True),
    "request_params_max_tokens": ("Most tokens a sequence might generate", "", True),
    "request_params_n": ("Choices asked for", "", True),
}


class EngineCollector(Collector):
    """Reads EngineMetrics at each scrape; before the model is loaded there is nothing to tell."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        served = self._service.served
        if served is None:
            return
        labels = {"model_name": self._service.model_name, "engine": "0"}
        metrics = served.engine.metrics
        for name, (text, split, has_alias) in _FIELDS.items():
            for prefix in (OURS, VLLM) if has_alias else (OURS,):
                yield _family(f"{prefix}:{name}", text, split, labels, getattr(metrics, name))
        yield from _cache_info(metrics, labels)

    def describe(self) -> list[Metric]:
        return []


async def metrics(request: web.Request) -> web.Response:
    """All numbers as Prometheus text."""
    return web.Response(body=generate_latest(request.app[REGISTRY]), headers={"Content-Type": _CONTENT_TYPE})


def create_registry(service: Service) -> CollectorRegistry:
    """A registry of this server's own, so that several may live in one process."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    return registry


def _family(name: str, text: str, split: str, labels: dict[str, str], metric: Counter | Gauge | Histogram) -> Metric:
    keys, values = [*labels], [*labels.values()]
    if isinstance(metric, Gauge):
        gauge = GaugeMetricFamily(name, text, labels=keys)
        gauge.add_metric(values, metric.value)
        return gauge
    if isinstance(metric, Histogram):
        histogram = HistogramMetricFamily(name, text, labels=keys)
        histogram.add_metric(values, metric.cumulative(), metric.total)
        return histogram
    counter = CounterMetricFamily(name, text, labels=[*keys, split] if split else keys)
    if split:
        for label, value in list(metric.by_label.items()):
            counter.add_metric([*values, label], value)
    else:
        counter.add_metric(values, metric.value)
    return counter


def _cache_info(metrics: EngineMetrics, labels: dict[str, str]) -> Iterator[Metric]:
    """The constant gauge from which routers read page size and count, under each one's own label names."""
    names = {OURS: ("page_size", "num_pages"), VLLM: ("block_size", "num_gpu_blocks")}
    for prefix, (size, count) in names.items():
        info = {size: metrics.info.get("block_size", ""), count: metrics.info.get("num_gpu_blocks", "")}
        family = GaugeMetricFamily(f"{prefix}:cache_config_info", "The KV cache", labels=[*labels, *info])
        family.add_metric([*labels.values(), *info.values()], 1.0)
        yield family


REGISTRY = web.AppKey("registry", CollectorRegistry)
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
