"""Probes, metrics and the model list."""

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from jcb.config import ServerConfig
from jcb.engine.async_engine import EngineState
from jcb.server.app import create_app, listen
from jcb.server.service import Service


def samples(text):
    """Sample name (with labels beyond the common ones) → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[(sample.name, *rest.values())] = sample.value
    return found


async def scrape(server):
    status, text = await server.get("/metrics")
    assert status == 200
    return samples(text)


async def test_probes_of_a_server_that_serves(server):
    for path in ("/live", "/health"):
        assert await server.get(path) == (200, "")
    status, text = await server.get("/ready")
    assert (status, '"idle"' in text) == (200, True)
    assert "version" in (await server.get("/version"))[1]


async def test_probes_of_a_server_that_loads():
    import aiohttp

    service = Service(config=ServerConfig(port=0, served_model_name="m"))
    listener = await listen(create_app(service), service.config)
    async with aiohttp.ClientSession() as session:
        service.progress("compile", 3, 12)
        assert service.state is EngineState.COMPILING
        for path, status in (("/live", 200), ("/health", 503), ("/ready", 503), ("/metrics", 200), ("/v1/models", 503)):
            async with session.get(listener.url + path) as response:
                assert response.status == status
                if status == 503:
                    answer = await response.json()
                    assert answer["error"]["code"]
                if path == "/ready":
                    assert (answer["state"], answer["stage"], answer["percent"]) == ("compiling", "compile", 25.0)
        async with session.post(listener.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
    await listener.close()


async def test_models(server):
    _, answer = await server.post("/v1/completions", {"prompt": "x"})
    name = answer["model"]
    async with server.session.get(server.url + "/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert card["id"] == name
    assert {"object", "created", "owned_by", "root", "parent", "max_model_len"} <= set(card)
    async with server.session.get(server.url + f"/v1/models/{name}") as response:
        assert await response.json() == card


async def test_a_served_name_replaces_the_models_own(start_server):
    server = await start_server(server=ServerConfig(port=0, served_model_name="org/nice-name"))
    assert (await server.get("/v1/models/org/nice-name"))[0] == 200
    assert (await server.complete(model="org/nice-name"))["model"] == "org/nice-name"
    assert (await server.post("/v1/completions", {"prompt": "x", "model": "fake"}))[0] == 404


async def test_metrics_count_what_happened(start_server):
    server = await start_server()
    await asyncio.gather(*[server.complete(prompt=[97] * 20, max_tokens=5, ignore_eos=True) for _ in range(4)])
    await server.settle()
    found = await scrape(server)
    for prefix in ("jcb", "vllm"):
        assert found[f"{prefix}:prompt_tokens_total",] == 80
        assert found[f"{prefix}:generation_tokens_total",] == 20
        assert found[f"{prefix}:request_success_total", "length"] == 4
        assert found[f"{prefix}:time_to_first_token_seconds_count",] == 4
        assert found[f"{prefix}:inter_token_latency_seconds_count",] == 16
        assert found[f"{prefix}:e2e_request_latency_seconds_count",] == 4
        assert found[f"{prefix}:request_queue_time_seconds_count",] == 4
        assert found[f"{prefix}:num_requests_running",] == found[f"{prefix}:num_requests_waiting",] == 0
        assert 0 <= found[f"{prefix}:kv_cache_usage_perc",] <= 1
    assert found["jcb:compiles_after_ready_total",] == 0
    assert found["jcb:steps_total",] > 0
    assert any(name[0] == "vllm:cache_config_info" for name in found)


async def test_b141_gauges_stay_in_their_bounds(start_server):
    server = await start_server(max_num_seqs=4)
    for _ in range(10):
        await scrape(server)
    tasks = [asyncio.create_task(server.complete(max_tokens=50, ignore_eos=True)) for _ in range(30)]
    for i in range(24):
        found = await scrape(server)
        assert 0 <= found["jcb:num_requests_running",] <= 4
        assert 0 <= found["jcb:num_requests_waiting",] <= 30
        for name in ("kv_cache_usage_perc", "kv_cache_cached_perc", "batch_slot_occupancy"):
            assert 0 <= found[f"jcb:{name}",] <= 1
        if i == 8:
            for task in tasks[::2]:
                task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.settle()
    found = await scrape(server)
    assert found["jcb:num_requests_running",] == found["jcb:kv_cache_usage_perc",] == 0
    assert all(value >= 0 for value in found.values())


async def test_b143_health_is_quick_under_load(start_server):
    server = await start_server()
    server.executor.step_seconds = 0.01
    tasks = [asyncio.create_task(server.complete(max_tokens=60, ignore_eos=True)) for _ in range(16)]
    times = []
    for _ in range(100):
        began = time.perf_counter()
        assert (await server.get("/health"))[0] == 200
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    assert sorted(times)[94] < 0.05


async def test_b185_idle_costs_no_cpu(server):
    await server.complete()
    await server.settle()
    began = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - began < 0.05
