"""Keys: every route but the probes is closed without one."""

import random

import pytest

from jcb.config import ServerConfig
from jcb.server.access import Access
from jcb.server.app import create_admin_app, create_app, listen
from jcb.server.auth import KEYS_VARIABLE, Keys, check_bind, read_keys
from jcb.server.routes import canonical, routes
from jcb.server.service import Service


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# team keys\nsecret-1\n\nsecret-2\n")
    return str(path)


CREDENTIALS = {
    "none": None,
    "empty": "Bearer ",
    "wrong": "Bearer wrong",
    "other scheme": "Basic secret-1",
    "user": "Bearer secret-1",
    "second user": "bearer secret-2",
    "admin": "Bearer secret-admin",
}


async def test_every_route_with_every_credential(start_server, key_file, tmp_path):
    """Deny by default: what a route of the application needs is in the table, and nothing passes with less."""
    admins = tmp_path / "admins"
    admins.write_text("secret-admin\n")
    config = ServerConfig(
        port=0,
        api_key_file=key_file,
        admin_key_file=str(admins),
        profile_folder=str(tmp_path / "profile"),
        live_knobs=True,
    )
    server = await start_server(server=config)
    table = {(route.method, canonical(route.path)): route.access for route in routes(config)}
    found = {(route.method, route.resource.canonical) for route in server.listener.runner.app.router.routes()}
    assert found == table.keys() | {("HEAD", path) for method, path in table if method == "GET"}
    public = {path for (_, path), access in table.items() if access is Access.PUBLIC}
    assert public == {"/live", "/ready", "/health", "/", "/playground/{name}"}  # the last two hold no data
    for (method, path), access in table.items():
        for name, header in CREDENTIALS.items():
            headers = {} if header is None else {"Authorization": header}
            async with server.session.request(
                method, server.url + path.replace("{id}", "fake").replace("{name}", "app.js"), headers=headers
            ) as response:
                is_user, is_admin = "user" in name, name == "admin"
                if access is Access.PUBLIC or is_admin or (is_user and access is Access.USER):
                    assert response.status not in (401, 403), (path, name)
                else:  # two users share this server: neither may watch the other
                    assert response.status == (403 if is_user else 401), (path, name)
                    error = (await response.json())["error"]
                    assert error["code"] == ("admin_only" if is_user else "invalid_api_key")
                    assert ("WWW-Authenticate" in response.headers) == (not is_user)


async def test_without_keys_only_this_machine_is_an_admin(start_server, tmp_path):
    server = await start_server(server=ServerConfig(port=0, profile_folder=str(tmp_path)))
    url = server.url + "/stop_profile"
    own = server.url.removeprefix("http://")
    for headers, status in (
        ({}, 409),
        ({"Origin": f"http://{own}"}, 409),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),  # a name that resolves to this machine
    ):
        async with server.session.post(url, headers=headers) as response:
            assert response.status == status, headers


def test_keys_come_from_a_file_or_the_environment(key_file, tmp_path):
    config = ServerConfig(api_key_file=key_file)
    assert Keys.read(config, {}).users == (b"secret-1", b"secret-2")
    assert Keys.read(config, {KEYS_VARIABLE: "third\n# no\nfourth"}).users[2:] == (b"third", b"fourth")
    assert Keys.read(ServerConfig(), {KEYS_VARIABLE: "only"}).tenant("Bearer only") == "0"
    admins = tmp_path / "admins"
    admins.write_text("root\n")
    keys = Keys.read(ServerConfig(api_key_file=key_file, admin_key_file=str(admins)), {})
    assert keys.tenant("Bearer root") == "admin0"
    with pytest.raises(ValueError, match="admin_key_file is set but"):
        Keys.read(ServerConfig(admin_key_file=str(admins)), {})


async def test_profiles_are_recorded_once_at_a_time(start_server, tmp_path):
    server = await start_server(server=ServerConfig(port=0, profile_folder=str(tmp_path)))
    status, answer = await server.post("/start_profile", {})
    assert (status, answer["error"]["code"]) == (501, "no_profiler")
    noted = []

    class Profiler:
        def start(self, folder):
            noted.append(folder)

        def stop(self):
            noted.append("stop")

    object.__setattr__(server.service.served, "profiler", Profiler())
    assert [(await server.post(path, {}))[0] for path in ("/stop_profile", "/start_profile", "/start_profile")] == [
        409, 200, 409,
    ]  # fmt: skip
    assert [(await server.post("/stop_profile", {}))[0] for _ in range(2)] == [200, 409]
    assert noted == [str(tmp_path), "stop"]
    other = await start_server()
    assert (await other.post("/start_profile", {}))[0] == 404  # not asked for, not there


async def test_pages_of_other_origins_read_answers_only_where_allowed(start_server):
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (
        ("", False),
        ("https://other.example", False),
        ("https://page.example, x", True),
        ("*", True),
    ):
        server = await start_server(server=ServerConfig(port=0, cors_origins=origins))
        async with server.session.options(server.url + "/v1/completions", headers=ask) as response:
            assert (response.status == 204) == allowed
            assert (response.headers.get("Access-Control-Allow-Origin") == "https://page.example") == allowed
        async with server.session.get(server.url + "/v1/models", headers=ask) as response:
            assert response.status == 200
            assert (response.headers.get("Access-Control-Allow-Origin") == "https://page.example") == allowed
        async with server.session.get(server.url + "/v1/models") as response:
            assert "Access-Control-Allow-Origin" not in response.headers


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
        read_keys("api_key_file", str(path))
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=r"api_key_file=.*cannot be read"):
            read_keys("api_key_file", str(bad))


def test_a_public_bind_without_a_key_is_refused(key_file):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ValueError, match="--api-key-file"):
            create_app(Service(config=ServerConfig(host=host)))
        check_bind(ServerConfig(host=host, insecure=True), Keys())
        check_bind(ServerConfig(host=host), Keys(read_keys("api_key_file", key_file)))
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        check_bind(ServerConfig(host=host), Keys())


async def test_metrics_and_admin_routes_can_have_a_port_of_their_own(start_server, key_file, tmp_path):
    config = ServerConfig(port=0, admin_port=1, api_key_file=key_file, profile_folder=str(tmp_path))
    server = await start_server(server=config)
    headers = {"Authorization": "Bearer secret-1"}
    assert (await server.get("/metrics", headers=headers))[0] == 404
    assert (await server.post("/stop_profile", {}, headers=headers))[0] == 404
    admin = await listen(create_admin_app(server.service), ServerConfig(port=0))
    for path, status in (("/metrics", 200), ("/health", 200), ("/v1/models", 404)):
        async with server.session.get(admin.url + path) as response:
            assert response.status == status, path
    async with server.session.post(admin.url + "/stop_profile") as response:
        assert response.status == 409
    async with server.session.post(admin.url + "/stop_profile", headers={"Origin": "http://evil.example"}) as response:
        assert response.status == 403
    await admin.close()
    assert (await server.get("/health"))[0] == 200
    for bad in ({"admin_port": 8000, "port": 8000}, {"admin_port": -1}):
        with pytest.raises(ValueError, match="admin_port"):
            ServerConfig(**bad)


async def test_the_only_user_may_watch_the_batch_and_one_of_several_may_not(start_server, tmp_path, key_file):
    alone = tmp_path / "alone"
    alone.write_text("secret-1\n")
    for path, status in ((str(alone), 200), (key_file, 403)):
        server = await start_server(server=ServerConfig(port=0, api_key_file=path))
        headers = {"Authorization": "Bearer secret-1"}
        async with server.session.get(server.url + "/v1/batch/events", headers=headers) as response:
            assert response.status == status
