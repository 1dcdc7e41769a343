"""Metadata as AWS, GCP and Azure document them, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
Answers = dict[str, tuple[int, str]]
"""By path: status and body."""


class Cloudlike(ThreadingHTTPServer):
    """Metadata of all three clouds, as they document them: without its header, nothing is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: Answers = {}
        self.tokens: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Cloudlike

    def do_PUT(self) -> None:  # the name that the base class calls
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token" or not lifetime.isdigit():
            return self.tell(400, "")
        self.server.tokens.append(f"token-{len(self.server.tokens)}")
        return self.tell(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        if self.path.startswith("/latest/"):
            is_let_in = self.headers.get("X-aws-ec2-metadata-token") == (self.server.tokens or [None])[-1]
            return self.tell(*(self.server.answers.get(self.path, (404, "")) if is_let_in else (401, "")))
        name = "Metadata-Flavor" if self.path.startswith("/computeMetadata/") else "Metadata"
        is_let_in = self.headers.get(name) == {"Metadata-Flavor": "Google", "Metadata": "true"}[name]
        return self.tell(*(self.server.answers.get(self.path, (404, "")) if is_let_in else (403, "")))

    def tell(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cloudlike() -> Iterator[Cloudlike]:
    """Serve it for as long as the block lasts."""
    with Cloudlike() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
