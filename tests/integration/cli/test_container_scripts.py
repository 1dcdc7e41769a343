"""A container's entry point and health check, run as the images run them, on networks of either kind."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "docker"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()
        self.wfile.write(b"the gateway does not answer")

    def log_message(self, *_: object) -> None:
        return None


class ServerOfIPv6(HTTPServer):
    address_family = socket.AF_INET6


@pytest.fixture(params=["127.0.0.1", "::1"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    host = request.param
    try:
        server = (ServerOfIPv6 if ":" in host else HTTPServer)((host, 0), Answers)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield host, server.server_port
        server.shutdown()
        thread.join()


def check(address: tuple[str, int], path: str) -> subprocess.CompletedProcess[str]:
    host, port = address
    own = {"FLOTILLA_HOST": host, "FLOTILLA_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, str(SCRIPTS / "health.py"), path]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=30)


def test_a_service_that_answers_is_healthy_whatever_proxy_is_set(address: tuple[str, int]) -> None:
    assert check(address, "/readyz").returncode == 0


def test_a_service_that_refuses_is_unhealthy_and_its_reason_is_shown(address: tuple[str, int]) -> None:
    result = check(address, "/other")

    assert result.returncode == 1
    assert result.stderr == "503: the gateway does not answer\n"


def test_a_service_that_does_not_answer_is_unhealthy_without_a_traceback() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = check(unused.getsockname(), "/readyz")

    assert result.returncode == 1
    assert "does not answer" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_entry_point_hands_the_address_on_and_becomes_the_service() -> None:
    script = "import os; print(os.getpid(), os.environ['FLOTILLA_HOST'])"
    command = [sys.executable, str(SCRIPTS / "entrypoint.py"), sys.executable, "-c", script]

    with subprocess.Popen(
        command, env={**os.environ, "FLOTILLA_HOST": "fd00:1::3"}, stdout=subprocess.PIPE, text=True
    ) as process:
        output, _ = process.communicate(timeout=30)

    assert output.split() == [str(process.pid), "fd00:1::3"]
