"""Files of rows over HTTP are bounded, and nothing is unpacked on the way."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flotilla.services.gateway.datasets import locations
from flotilla.services.gateway.datasets.locations import fetch_from_web
from flotilla.shared.environment.settings import LOOPBACK
from flotilla.shared.errors import DataError


@contextmanager
def serving(body: bytes, *, encoding: str = "", repeats: int = 1) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if encoding:
                self.send_header("content-encoding", encoding)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(repeats):
                    self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        finally:
            server.shutdown()
            thread.join()


def test_a_file_is_fetched_whole_and_spools_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "MEMORY_BYTES", 1000)
    with serving(b"0123456789", repeats=1000) as url, fetch_from_web(url, LOOPBACK) as file:
        assert file.read() == b"0123456789" * 1000


@pytest.mark.parametrize(
    ("encoding", "repeats", "words"),
    [("gzip", 1, "it comes compressed"), ("", 1 << 20, "it has more than 100000 bytes")],
)
def test_what_is_too_large_or_unpacks_to_more_is_refused(
    monkeypatch: pytest.MonkeyPatch, encoding: str, repeats: int, words: str
) -> None:
    monkeypatch.setattr(locations, "MAX_BYTES", 100_000)
    body = gzip.compress(b"0" * 10_000_000) if encoding else b"0" * 4096
    with serving(body, encoding=encoding, repeats=repeats) as url, pytest.raises(DataError, match=words):
        fetch_from_web(url, LOOPBACK)
