"""What /metrics tells, the dashboard that reads it, and traces."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from jcb.config import ServerConfig
from jcb.server.tracing import NoTracer, OtlpTracer, make_tracer

DASHBOARD = Path(__file__).parents[2] / "configs" / "deploy" / "grafana.json"

# names of vLLM 0.33 that its dashboards, routers and benchmarks read
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "iteration_tokens_total_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_max_tokens_bucket",
    "request_params_n_bucket",
    "time_per_output_token_seconds_bucket",
    "gpu_cache_usage_perc",
]


def sample_names(text):
    """Every sample's name; a counter whose labels nobody has used yet has only its family's."""
    families = list(text_string_to_metric_families(text))
    names = {sample.name for family in families for sample in family.samples}
    return names | {f"{family.name}_total" for family in families if family.type == "counter"}


@pytest.fixture
async def used(server):
    await asyncio.gather(*[server.complete(prompt=[97 + i] * 20, max_tokens=5, ignore_eos=True) for i in range(4)])
    return server


async def test_the_names_others_read_are_there_unless_told_otherwise(used, start_server):
    names = sample_names((await used.get("/metrics"))[1])
    assert {f"vllm:{name}" for name in VLLM} <= names
    server = await start_server(server=ServerConfig(port=0, vllm_metrics=False))
    await server.complete()
    names = sample_names((await server.get("/metrics"))[1])
    assert not any(name.startswith("vllm:") for name in names)
    assert "jcb:num_requests_running" in names


async def test_every_metric_of_the_dashboard_exists(used):
    names = sample_names((await used.get("/metrics"))[1])
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [item["query"] for item in dashboard["templating"]["list"]]
    named = {name for expression in expressions for name in re.findall(r"jcb:\w+", expression)}
    assert len(named) > 25
    assert named <= names
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for box in boxes
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"


async def test_host_and_device_times_add_up(server):
    server.slow_down(0.01)
    await server.complete(max_tokens=20, ignore_eos=True)
    await server.settle()
    metrics = server.async_engine.metrics
    assert metrics.step_device_seconds.count == metrics.step_host_seconds.count >= 20
    assert metrics.step_device_seconds.total > 0
    done = metrics.request_inference_time_seconds.total
    assert done == pytest.approx(metrics.request_prefill_time_seconds.total + metrics.request_decode_time_seconds.total)
    assert metrics.e2e_request_latency_seconds.total >= done


async def test_a_request_is_a_span_of_its_callers_trace(start_server):
    server = await start_server()
    exporter = InMemorySpanExporter()
    server.service.tracer = tracer = OtlpTracer("http://localhost:4318/v1/traces", exporter=exporter)
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = {"prompt": "canary prompt", "max_tokens": 3, "ignore_eos": True, "temperature": 0.5}
    await server.post("/v1/completions", body, headers=parent)
    await server.events("/v1/completions", body)
    server.executor.fails_dispatch = lambda plan: True
    assert (await server.post("/v1/completions", body))[0] == 500
    await asyncio.to_thread(tracer.close)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["llm_request"] * 3
    assert f"{spans[0].context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    for span in spans[:2]:
        assert span.attributes["gen_ai.usage.input_tokens"] == 13
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert 0 <= span.attributes["gen_ai.latency.time_in_queue"] <= span.attributes["gen_ai.latency.e2e"]
    assert spans[2].attributes["error.type"] == "RequestError"
    assert not any("canary" in str(span.attributes) for span in spans)


def test_nothing_is_traced_unless_asked_for(monkeypatch):
    assert isinstance(make_tracer(""), NoTracer)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match="needs the otlp extra"):
        make_tracer("http://localhost:4318/v1/traces")
