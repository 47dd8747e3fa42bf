"""The page at `/`: its files, its headers, and that it needs nothing from anywhere else."""

import re

import pytest

from jcb.server.page import INDEX, read_files

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def test_every_file_is_served_with_its_type_and_headers(server):
    files = read_files()
    assert {".html", ".css", ".js", ".svg"} == {name[name.rindex(".") :] for name in files}
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name, content in files.items():
        path = "/" if name == INDEX else f"/playground/{name}"
        async with server.session.get(server.url + path) as response:
            assert response.status == 200
            assert await response.read() == content
            assert response.headers["Content-Type"] == f"{types[name.rpartition('.')[2]]}; charset=utf-8"
            assert response.headers["Content-Security-Policy"] == POLICY
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "name", ["nowhere.js", "__init__.py", "..%2Fapp.py", "%2e%2e/app.py", "app.js%00", ".", "wide.png", ""]
)
async def test_no_other_file_is(server, name):
    async with server.session.get(f"{server.url}/playground/{name}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


def test_the_page_asks_for_nothing_outside_and_has_no_script_in_it():
    for name, content in read_files().items():
        text = content.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(?:https?:)?//(?!\s)[\w.-]+\.\w{2,}/", text), name
        assert "eval(" not in text
        assert "innerHTML" not in text, name  # what models write is text, never markup
    page = read_files()[INDEX].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\s(?:on\w+|style)=", page)
    asked = set(re.findall(r'(?:src|href)="playground/([\w.-]+)"', page))
    assert asked
    assert asked <= read_files().keys()
    for name, content in read_files().items():
        for other in re.findall(r'from "\./([\w.-]+)"', content.decode()):
            assert other in read_files(), f"{name} imports {other}"
