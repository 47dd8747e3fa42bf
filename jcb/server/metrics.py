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

# field of EngineMetrics → (what it tells, label its split has, names vLLM has or had for it; SAME: our own)
SAME = ("",)
_FIELDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "num_requests_running": ("Sequences that hold a slot", "", SAME),
    "num_requests_waiting": ("Sequences that wait for a slot", "", SAME),
    "kv_cache_usage_perc": ("Part of the pages that sequences use, 0 to 1", "", ("", "gpu_cache_usage_perc")),
    "kv_cache_cached_perc": ("Part of the pages that only the prefix cache holds, 0 to 1", "", ()),
    "batch_slot_occupancy": ("Rows of the last step by slots, 0 to 1", "", ()),
    "model_load_seconds": ("Time from start to ready", "", ()),
    "weight_bytes": ("Memory of the weights on each device", "", ()),
    "page_bytes": ("Memory of the KV cache's pages on each device", "", ()),
    "prompt_tokens": ("Prompt tokens of sequences that gave a token", "", SAME),
    "generation_tokens": ("Tokens generated", "", SAME),
    "request_success": ("Sequences ended, by reason", "finished_reason", SAME),
    "request_errors": ("Sequences ended by an error, by status", "status", ()),
    "num_preemptions": ("Sequences that gave up their pages", "", SAME),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "", SAME),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "", SAME),
    "admission_rejections": ("Requests refused for want of room", "", SAME),
    "steps": ("Steps of the loop", "", ()),
    "compiles_after_ready": ("Programs compiled after warm-up: 0 unless something is wrong", "", ()),
    "compile_seconds": ("Time spent in compiling", "stage", ()),
    "programs": ("Programs compiled at start: all there will ever be", "", ()),
    "bucket_hits": ("Steps, by the program that ran them", "program", ()),
    "bucket_tokens": ("Tokens asked for, by the program that ran them", "program", ()),
    "bucket_padding": ("Tokens computed for nothing, by the program that ran them", "program", ()),
    "step_host_seconds": ("Time of a step that the host worked, not waiting for the device", "", ()),
    "step_device_seconds": ("Time of a step on the device, at most: until the host took the result", "", ()),
    "time_to_first_token_seconds": ("From arrival to the first token", "", SAME),
    "inter_token_latency_seconds": ("Between two tokens of a sequence", "", ("", "time_per_output_token_seconds")),
    "request_time_per_output_token_seconds": ("Mean time a token after the first", "", SAME),
    "e2e_request_latency_seconds": ("From arrival to the end", "", SAME),
    "request_queue_time_seconds": ("From arrival to the first step", "", SAME),
    "request_prefill_time_seconds": ("From the first step to the first token", "", SAME),
    "request_decode_time_seconds": ("From the first token to the end", "", SAME),
    "request_inference_time_seconds": ("From the first step to the end", "", SAME),
    "iteration_tokens": ("Tokens a step", "", ("iteration_tokens_total",)),
    "request_prompt_tokens": ("Prompt tokens a sequence", "", SAME),
    "request_generation_tokens": ("Generated tokens a sequence", "", SAME),
    "request_params_max_tokens": ("Most tokens a sequence might generate", "", SAME),
    "request_params_n": ("Choices asked for", "", SAME),
}


class EngineCollector(Collector):
    """Reads EngineMetrics at each scrape; before the model is loaded there is nothing to tell."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        limit = self._service.connections
        if limit is not None:
            yield GaugeMetricFamily(f"{OURS}:connections_open", "Connections that are open", value=limit.num_open)
            text = "Connections refused because there were too many"
            yield CounterMetricFamily(f"{OURS}:connections_refused", text, value=limit.num_refused)
        served = self._service.served
        if served is None:
            return
        labels = {"model_name": self._service.model_name, "engine": "0"}
        metrics, has_aliases = served.engine.metrics, self._service.config.vllm_metrics
        for name, (text, split, aliases) in _FIELDS.items():
            yield _family(f"{OURS}:{name}", text, split, labels, getattr(metrics, name))
            for alias in aliases if has_aliases else ():
                yield _family(f"{VLLM}:{alias or name}", text, split, labels, getattr(metrics, name))
        yield from _cache_info(metrics, labels, (OURS, VLLM) if has_aliases else (OURS,))

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


def _cache_info(metrics: EngineMetrics, labels: dict[str, str], prefixes: tuple[str, ...]) -> Iterator[Metric]:
    """The constant gauge from which routers read page size and count, under each one's own label names."""
    names = {OURS: ("page_size", "num_pages"), VLLM: ("block_size", "num_gpu_blocks")}
    for prefix in prefixes:
        size, count = names[prefix]
        info = {size: metrics.info.get("block_size", ""), count: metrics.info.get("num_gpu_blocks", "")}
        family = GaugeMetricFamily(f"{prefix}:cache_config_info", "The KV cache", labels=[*labels, *info])
        family.add_metric([*labels.values(), *info.values()], 1.0)
        yield family


REGISTRY = web.AppKey("registry", CollectorRegistry)
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
