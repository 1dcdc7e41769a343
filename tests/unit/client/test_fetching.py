"""A model is fetched once, goes on where it broke off, and is what the checkpoint says it is."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import xxhash

from flotilla.client import fetching
from flotilla.client.fetching import download
from flotilla.shared.errors import NotFound, Unavailable
from flotilla.shared.schemas.experiment import CheckpointFile

CONTENT = {"model/config.json": b"{}", "model/model.safetensors": bytes(range(200)), "model/empty": b""}


def listed(name: str, content: bytes) -> CheckpointFile:
    return CheckpointFile(name=name, size_bytes=len(content), checksum=xxhash.xxh3_64_hexdigest(content))


FILES = [*(listed(*item) for item in CONTENT.items()), listed("optimizer.safetensors", b"moments")]


class Server:
    """Sends in pieces of 50 bytes; breaks off after the pieces it is told to."""

    def __init__(self, *breaks_after: int) -> None:
        self.breaks_after = list(breaks_after)
        self.asked: list[tuple[str, int]] = []
        self.content = dict(CONTENT)

    async def open(self, name: str, start: int) -> AsyncGenerator[bytes, None]:
        self.asked.append((name, start))
        pieces = self.breaks_after.pop(0) if self.breaks_after and name.endswith("safetensors") else 1000
        content = self.content[name]
        for number, offset in enumerate(range(start, len(content), 50)):
            if number == pieces:
                raise Unavailable("broke off")
            yield content[offset : offset + 50]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "RETRY_SECONDS", 0.0)


def held(directory: Path) -> dict[str, bytes]:
    return {f"model/{path.relative_to(directory)}": path.read_bytes() for path in directory.rglob("*")}


async def test_the_models_files_alone_are_fetched_and_once(tmp_path: Path) -> None:
    server = Server()

    await download(FILES, tmp_path, server.open)
    await download(FILES, tmp_path, server.open)

    assert held(tmp_path) == CONTENT
    assert sorted(server.asked) == [("model/config.json", 0), ("model/model.safetensors", 0)]


async def test_a_download_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    server = Server(1, 2)

    await download(FILES, tmp_path, server.open)

    assert held(tmp_path) == CONTENT
    assert [start for name, start in server.asked if name.endswith("safetensors")] == [0, 50, 150]


async def test_what_is_left_of_another_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").write_bytes(b"x" * 60)
    (tmp_path / "config.json").write_bytes(b"[]")
    server = Server()

    await download(FILES, tmp_path, server.open)

    assert held(tmp_path) == CONTENT
    assert [start for name, start in server.asked if name.endswith("safetensors")] == [60, 0]


async def test_a_file_that_stays_wrong_or_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.content["model/model.safetensors"] = bytes(200)
    with pytest.raises(Unavailable, match="came twice with another checksum"):
        await download(FILES, tmp_path, server.open)

    async def gone(name: str, start: int) -> AsyncGenerator[bytes, None]:
        raise NotFound("removed")
        yield b""

    with pytest.raises(NotFound):
        await download(FILES, tmp_path, gone)
    monkeypatch.setattr(fetching, "ABSENCE_SECONDS", -1.0)
    with pytest.raises(Unavailable, match="fetch it again to go on with it"):
        await download(FILES, tmp_path, Server(0).open)
