"""Who waits to read samples, and who does not; when files are indexed."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import samples as route
from flotilla.services.gateway.samples import indexing
from flotilla.services.gateway.samples.indexing import SampleReads
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.errors import TooManyRequests
from flotilla.shared.samples.folder import SAMPLES, SampleFolder
from flotilla.shared.samples.index import DATABASE
from tests.unit.gateway.builders import a_gateway, add_experiment, until
from tests.unit.samples.builders import a_step

NUM_FILES = 4


@pytest.fixture
def reads() -> Iterator[SampleReads]:
    made = SampleReads(at_once=1, max_of_one=3)
    yield made
    made.close()


async def test_who_hung_up_while_waiting_is_not_read_for(reads: SampleReads) -> None:
    may_end, read = threading.Event(), list[str]()
    first = asyncio.create_task(reads.read("a", lambda: may_end.wait(10)))
    waiting = [asyncio.create_task(reads.read("a", lambda: read.append("gone"))) for _ in range(2)]
    await asyncio.sleep(0)

    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    last = asyncio.create_task(reads.read("a", lambda: read.append("still there")))
    may_end.set()
    await asyncio.gather(first, last)

    assert read == ["still there"]


async def test_one_token_has_so_many_open_and_keeps_nobody_else_out(reads: SampleReads) -> None:
    may_end = threading.Event()
    held = [asyncio.create_task(reads.read("a", lambda: may_end.wait(10))) for _ in range(3)]
    await asyncio.sleep(0)

    with pytest.raises(TooManyRequests, match="3 requests"):
        await reads.read("a", lambda: None)
    other = asyncio.create_task(reads.read("b", lambda: "read"))
    may_end.set()

    assert await other == "read"
    await asyncio.gather(*held)
    assert await reads.read("a", lambda: "again") == "again"


class Looker:
    """A gateway with an experiment that has written samples, and who looks at them."""

    def __init__(self, gateway: GatewayState, directory: Path) -> None:
        self.gateway, self.index = gateway, directory / SAMPLES / DATABASE
        app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"state": {"gateway": gateway}}, receive, send)

        headers = {"Authorization": "Bearer t"}
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(with_state), base_url="http://x", headers=headers
        )

    async def unread(self) -> int:
        """Look, and tell how many files were not looked at."""
        answer = await self._client.get("/v1/experiments/tiny-1/samples")
        return int(answer.raise_for_status().json()["num_unread"])

    def num_indexed(self) -> int:
        """Count the files in the index, without reading any."""
        database = sqlite3.connect(self.index)
        try:
            return int(database.execute("SELECT count(*) FROM files").fetchone()[0])
        finally:
            database.close()


@pytest.fixture
async def looker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Looker]:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    await gateway.repository.update(experiment, directory=str(tmp_path))
    folder = SampleFolder(tmp_path, SamplesConfig())
    for step in range(1, NUM_FILES + 1):
        folder.write(a_step(step))
    # So little time that each stretch reads one file.
    monkeypatch.setattr(route, "READ_SECONDS", 0.0)
    monkeypatch.setattr(indexing, "READ_SECONDS", 0.0)
    monkeypatch.setattr(indexing, "PAUSE_SECONDS", 0.0)
    yield Looker(gateway, tmp_path)
    gateway.samples.close()


async def test_what_a_look_leaves_unread_is_read_on_behind_it(looker: Looker) -> None:
    assert not looker.index.exists()

    first = await looker.unread()
    await until(lambda: looker.num_indexed() == NUM_FILES)

    assert first == NUM_FILES - 1
    assert await looker.unread() == 0


async def test_the_reading_behind_a_look_ends_with_the_index(looker: Looker) -> None:
    experiment = looker.gateway.repository.get("tiny-1")
    await looker.unread()
    looker.gateway.samples.read_on(experiment)
    looker.gateway.samples.forget(experiment)

    await until(lambda: all(each.get_name() != "sample index" for each in asyncio.all_tasks()))


async def test_an_index_that_cannot_be_read_is_tried_again_by_the_next_look(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = looker.gateway.repository.get("tiny-1")
    with monkeypatch.context() as broken:
        broken.setattr(looker.gateway.samples.of(experiment), "refresh", _fail)
        looker.gateway.samples.read_on(experiment)
        await until(lambda: all(each.get_name() != "sample index" for each in asyncio.all_tasks()))
    left = await looker.unread()
    await until(lambda: looker.num_indexed() == NUM_FILES)

    assert left == NUM_FILES - 1


def _fail(*, seconds: float) -> tuple[int, int]:
    raise OSError("gone")
