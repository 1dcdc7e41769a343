"""A dataset by its hub name, from an endpoint that speaks the hub's protocol; and what is said of one that is not."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = "".join(json.dumps({"prompt": f"p{n}", "label": str(n)}) + "\n" for n in range(3))
FILES = {
    "README.md": "# no head\n",
    "data/train-00000-of-00001.jsonl": ROWS,
    "data/test-00000-of-00001.jsonl": json.dumps({"prompt": "held out", "label": "1"}) + "\n",
}
LOAD = """
import json, sys
from flotilla.services.gateway.datasets import locations as places
from flotilla.services.gateway.datasets.loading import load_training
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.errors import DataError
if sys.argv[2] == "without":
    sys.modules["huggingface_hub"] = None
places.PAUSES_SECONDS = ()
try:
    dataset = load_training(DataConfig(sources=[json.loads(sys.argv[1])], shuffle=False), seed=0)
except DataError as error:
    print(json.dumps(error.detail))
else:
    print(json.dumps([row["prompt"] for row in dataset.rows]))
"""


class Hub(BaseHTTPRequestHandler):
    """The four calls that a download makes."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))  # type: ignore[attr-defined]
        if not path.removeprefix("/api").startswith("/datasets/owner/set"):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/other" in path:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/datasets/owner/set/tree/"):
            listed = [{"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in FILES.items()]
            self._answer(200, json.dumps(listed).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            found = {"id": "owner/set", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._answer(200, json.dumps(found).encode())
        else:
            text = FILES[path.split("/resolve/")[1].partition("/")[2]].encode()
            self._answer(200, text, {"ETag": f'"{hashlib.sha1(text).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def load(hub: ThreadingHTTPServer, home: Path, source: dict[str, object], package: str = "with") -> object:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(source), package],
        capture_output=True, text=True, timeout=60, env=environment, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_split_is_downloaded_once_and_alone(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    assert load(hub, tmp_path, {"hub": "owner/set"}) == ["p0", "p1", "p2"]
    asked: list[tuple[str, str]] = hub.asked  # type: ignore[attr-defined]
    fetched = {path.rpartition("/")[2] for method, path in asked if method == "GET" and "/resolve/" in path}
    assert fetched == {"README.md", "train-00000-of-00001.jsonl"}

    asked.clear()
    assert load(hub, tmp_path, {"hub": "owner/set"}) == ["p0", "p1", "p2"]
    assert [path for method, path in asked if method == "GET" and "/resolve/" in path] == []


def test_what_cannot_be_had_is_said(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    assert load(hub, tmp_path, {"hub": "owner/set", "split": "test"}) == ["held out"]
    assert "no split 'validation'; splits there: test, train" in str(
        load(hub, tmp_path, {"hub": "owner/set", "split": "validation"})
    )
    assert "there is no hub dataset owner/none" in str(load(hub, tmp_path, {"hub": "owner/none"}))
    assert "has no revision 'other'" in str(load(hub, tmp_path, {"hub": "owner/set", "revision": "other"}))
    assert "install flotilla[hub]" in str(load(hub, tmp_path, {"hub": "owner/set"}, "without"))
