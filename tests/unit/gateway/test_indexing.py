"""Who waits to read samples, and who does not."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from flotilla.services.gateway.samples.indexing import SampleReads
from flotilla.shared.errors import TooManyRequests


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
