"""A model by its hub name, from an endpoint that speaks the hub's protocol; and what is said of one that is not had."""

import asyncio
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from flotilla.services.gateway.preflight import checks, models
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.models import download as model_download
from flotilla.shared.models import hub as model_hub
from flotilla.shared.models.hub import fetch_small, fetched, is_whole, model_directory
from tests.unit.gateway.builders import a_spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_a-token-that-nobody-may-see"
CHUNK = 10 << 20
"""What huggingface_hub writes at a time."""
WEIGHTS = bytes(range(256)) * (CHUNK // 100)
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}",
    "README.md": b"# a model",
    "onnx/model.onnx": b"x" * 100,
    "model.safetensors": WEIGHTS,
}


class Server(ThreadingHTTPServer):
    """A hub with one model, ``owner/tiny``; ``owner/gated`` needs a token that was accepted.

    Attributes:
        asked: method and path of each request, with the range that it asked for.
        breaks: how many times the weights break off in the middle.
    """

    asked: list[tuple[str, str, str]]
    breaks = 0


class Hub(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, self.headers.get("Range", "")))
        if "/owner/gated" in path:
            self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/owner/tiny" not in path:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/missing" in path:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            found = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._answer(200, json.dumps(found).encode())
        else:
            self._send(FILES[path.split("/resolve/")[1].partition("/")[2]])

    def _send(self, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0-").partition("-")[0]) or 0)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._answer(206 if start else 200, content[start:], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            if len(body) > 1 << 20 and self.server.breaks:
                self.server.breaks -= 1
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def loaded(hub: Server) -> set[str]:
    return {path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path}


async def test_a_model_is_downloaded_once_even_by_two_at_a_time_and_used_without_the_hub(
    hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(path="owner/tiny")
    told: list[tuple[int, int]] = []

    first, second = await asyncio.gather(fetched(model, lambda *each: told.append(each)), fetched(model))

    assert first == second and is_whole(first)
    assert {path.name for path in first.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (first / "model.safetensors").read_bytes() == WEIGHTS
    total = sum(len(FILES[name]) for name in ("config.json", "tokenizer.json", "model.safetensors"))
    assert told[-1] == (total, total)
    weights = [path for method, path, _ in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(weights) == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert await fetched(model) == first
    assert model_directory(model.model_copy(update={"revision": COMMIT})) == first


async def test_a_connection_that_breaks_in_the_middle_costs_nothing_that_came(hub: Server) -> None:
    hub.breaks = 1

    directory = await fetched(ModelConfig(path="owner/tiny"))

    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked for _, path, asked in hub.asked if path.endswith("model.safetensors") and asked]
    assert f"bytes={CHUNK}-" in ranges


def test_the_gateway_pins_the_commit_and_loads_no_weights(hub: Server) -> None:
    spec = a_spec(model={"path": "owner/tiny"})

    pinned = checks.pinned(spec)

    assert pinned.model.revision == COMMIT
    checks.check_paths(pinned)
    models.check_model(pinned)
    assert loaded(hub) == {"config.json", "tokenizer.json"}
    assert checks.pinned(pinned) == pinned


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"path": "owner/tiny", "revision": "missing"}, "owner/tiny has no revision 'missing' (model.revision)"),
        ({"path": "owner/gated"}, "is gated: accept its conditions at http://127.0.0.1"),
        ({"path": "owner/none"}, "there is no model owner/none on the hub"),
    ],
    ids=["revision", "gated", "unknown"],
)
async def test_what_the_hub_does_not_give_is_named_and_not_tried_for_ever(
    model: dict[str, str], said: str, hub: Server
) -> None:
    with pytest.raises(ModelError) as refused:
        await fetched(ModelConfig(**model))

    assert said in refused.value.detail
    assert SECRET not in refused.value.detail


async def test_without_a_network_the_way_around_is_named(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    model = ModelConfig(path="owner/tiny", revision="v1")

    with pytest.raises(Unavailable) as absent:
        await fetched(model)

    assert "`hf download owner/tiny --revision v1 --local-dir tiny`, copy the folder" in absent.value.detail
    assert str(model_hub.cache_directory()) in absent.value.detail
    # A request of a person's is answered: waiting is for services.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        fetch_small(model)


@pytest.mark.usefixtures("hub")
async def test_who_is_cancelled_leaves_no_download_behind() -> None:
    task = asyncio.create_task(fetched(ModelConfig(path="owner/tiny")))
    async with asyncio.timeout(60):
        while not (made := downloads()):
            await asyncio.sleep(0.01)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not any(each.is_running() for each in made)


@pytest.mark.usefixtures("hub")
async def test_a_download_that_is_killed_may_be_tried_again_and_says_how_it_ended() -> None:
    task = asyncio.create_task(fetched(ModelConfig(path="owner/tiny")))
    async with asyncio.timeout(60):
        while not (made := downloads()):
            await asyncio.sleep(0.01)

    made[0].kill()

    with pytest.raises(Unavailable, match=r"model\.path: the process of the download of owner/tiny.* code -9"):
        await task


def downloads() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if "flotilla.shared.models.download" in process.cmdline():
                found.append(process)
    return found


def test_what_makes_a_model_is_chosen_small_files_first() -> None:
    files = [("b.safetensors", 2), ("onnx/model.safetensors", 3), ("config.json", 1), ("a.bin", 9), ("vocab.txt", 1)]

    assert model_download.wanted(files) == [("vocab.txt", 1), ("config.json", 1), ("b.safetensors", 2)]
