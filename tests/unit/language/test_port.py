"""A model server's port that is somewhere else."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from grpo.language.port import Port, ServerFailed


@pytest.fixture
def moved():
    """A server that sends whoever asks to `moved.there`, with a page that says so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked += 1
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(server.status)
            if server.there is not None:
                self.send_header("Location", server.there)
            page = b"<html>Moved</html>"
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, *given): ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.status, server.there, server.asked = 301, None, 0
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "there", "said"),
    [
        (
            301,
            "https://models.example/v1/models",
            "sends to https://models.example instead (301); servers: write https",
        ),
        (307, "https://models.example/v1/models?token=secret", "sends to https://models.example instead (307)"),
        (302, "/login", "sends to /login instead (302); servers: is it vLLM, and not a page to log in?"),
        (304, None, "sends to nowhere instead (304)"),
    ],
)
def test_a_server_that_sends_elsewhere_is_said_to_with_the_address_to_write(moved, status, there, said):
    moved.status, moved.there = status, there
    port = Port(f"http://127.0.0.1:{moved.server_port}", 5.0)
    for ask in (port.served, lambda: port.ask("/v1/models"), lambda: port.call("/v1/models", {"n": 1}, optional=True)):
        with pytest.raises(ServerFailed) as raised:
            ask()
        assert said in str(raised.value) and "secret" not in str(raised.value) and "\n" not in str(raised.value)
    assert moved.asked == 3  # nobody asks again what will not be answered here
    assert not port.healthy(5.0)
