"""Keys: every route but the probes is closed without one."""

import random

import pytest

from jcb.config import ServerConfig
from jcb.server.auth import PUBLIC_ROUTES, check_bind, read_keys
from jcb.server.service import Service


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# team keys\nsecret-1\n\nsecret-2\n")
    return str(path)


async def test_all_routes_but_the_probes_want_a_key(start_server, key_file):
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    app = server.listener.runner.app
    paths = {route.resource.canonical for route in app.router.routes()}
    assert {"/v1/completions", "/metrics"} <= paths
    for route in app.router.routes():
        path = route.resource.canonical.replace("{id}", "fake")
        async with server.session.request(route.method, server.url + path) as response:
            if path in PUBLIC_ROUTES:
                assert response.status == 200
            else:
                assert response.status == 401
                assert route.method == "HEAD" or (await response.json())["error"]["code"] == "invalid_api_key"
                assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_401_before_404_405_and_the_body(start_server, key_file):
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    for method, path in (("GET", "/nowhere"), ("GET", "/v1/completions"), ("POST", "/health/x"), ("GET", "//health")):
        async with server.session.request(method, server.url + path) as response:
            assert response.status == 401
    async with server.session.post(server.url + "/v1/completions", data=b"{") as response:
        assert response.status == 401


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic secret-1", "Bearer secret-1x"])
async def test_a_wrong_key_is_refused(start_server, key_file, header):
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    status, _ = await server.get("/v1/models", headers={"Authorization": header})
    assert status == 401


async def test_each_key_works_and_has_its_own_cache_scope(start_server, key_file):
    server = await start_server(server=ServerConfig(port=0, api_key_file=key_file))
    prompt = [97 + random.randrange(26) for _ in range(60)]

    async def cached(key, **fields):
        body = {"prompt": prompt, "max_tokens": 1} | fields
        status, answer = await server.post("/v1/completions", body, headers={"Authorization": f"bearer {key}"})
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached("secret-1") == 0
    assert await cached("secret-1") > 0
    assert await cached("secret-2") == 0
    assert await cached("secret-1", cache_salt="other") == 0
    assert await cached("secret-1", cache_salt="other") > 0


async def test_an_empty_bearer_passes_when_no_key_is_set(server):
    status, _ = await server.get("/v1/models", headers={"Authorization": "Bearer "})
    assert status == 200


def test_a_key_file_without_keys_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# nothing\n\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(str(path))
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=r"api_key_file=.*cannot be read"):
            read_keys(str(bad))


def test_a_public_bind_without_a_key_is_refused(key_file):
    from jcb.server.app import create_app

    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ValueError, match="--api-key-file"):
            create_app(Service(config=ServerConfig(host=host)))
        check_bind(ServerConfig(host=host, insecure=True), ())
        check_bind(ServerConfig(host=host), read_keys(key_file))
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        check_bind(ServerConfig(host=host), ())
