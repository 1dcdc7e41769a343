"""A container's entry point and health check, run as the images run them, on networks of either kind."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from flotilla.cli.redis_server import find_server
from flotilla.shared.net.server.ports import lasting_port

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
    with tempfile.TemporaryDirectory() as folder:
        own["TMPDIR"] = folder
        subprocess.run([sys.executable, str(SCRIPTS / "entrypoint.py"), "true"], env={**os.environ, **own}, check=True)
        command = [str(SCRIPTS / "health.sh"), path]
        return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=30)


def test_a_service_that_answers_is_healthy_whatever_proxy_is_set(address: tuple[str, int]) -> None:
    assert check(address, "/readyz").returncode == 0


def test_a_service_that_refuses_is_unhealthy_and_its_reason_is_shown(address: tuple[str, int]) -> None:
    result = check(address, "/other")

    assert result.returncode == 1
    assert result.stdout == "the gateway does not answer"
    assert "503" in result.stderr


def test_a_service_that_does_not_answer_is_unhealthy_without_a_traceback() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = check(unused.getsockname(), "/readyz")

    assert result.returncode == 1
    assert "Failed to connect" in result.stderr


def test_a_check_before_the_entry_point_has_said_the_address_is_unhealthy(tmp_path: Path) -> None:
    own = {**os.environ, "FLOTILLA_PORT": "8470", "TMPDIR": str(tmp_path)}

    result = subprocess.run([str(SCRIPTS / "health.sh"), "/readyz"], env=own, capture_output=True, text=True)

    assert result.returncode == 1
    assert "flotilla-address" in result.stderr


def test_a_password_in_an_included_file_is_in_no_argument_of_the_data_plane(tmp_path: Path) -> None:
    """What the composed data plane does with its secret, with the server that is here."""
    password, included = tmp_path / "redis-password", tmp_path / "password.conf"
    password.write_text("0123abc")
    port = lasting_port("127.0.0.1")
    write = f"printf 'requirepass %s\\n' \"$(cat {password})\" > {included}"
    script = f"{write} && exec {find_server()} --port {port} --include {included}"

    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            client = Redis.from_url(f"redis://:0123abc@127.0.0.1:{port}/0", retry=Retry(ConstantBackoff(0.1), 100))
            assert client.ping()
            client.close()
            with pytest.raises(AuthenticationError):
                Redis.from_url(f"redis://127.0.0.1:{port}/0").ping()
            assert b"0123abc" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert b"0123abc" not in Path(f"/proc/{server.pid}/environ").read_bytes()
        finally:
            server.terminate()


def test_the_entry_point_hands_the_address_on_and_becomes_the_service() -> None:
    script = "import os; print(os.getpid(), os.environ['FLOTILLA_HOST'])"
    command = [sys.executable, str(SCRIPTS / "entrypoint.py"), sys.executable, "-c", script]

    with subprocess.Popen(
        command, env={**os.environ, "FLOTILLA_HOST": "fd00:1::3"}, stdout=subprocess.PIPE, text=True
    ) as process:
        output, _ = process.communicate(timeout=30)

    assert output.split() == [str(process.pid), "fd00:1::3"]
