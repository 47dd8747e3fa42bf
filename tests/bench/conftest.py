"""The scripted server of the server's own tests."""

from tests.server.conftest import server, start_server  # noqa: F401 (fixtures)
