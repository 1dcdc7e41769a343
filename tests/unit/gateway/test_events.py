import asyncio

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.routes.events import frame_of
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from tests.unit.gateway.builders import turns


async def test_a_follower_gets_what_it_missed_and_what_comes_and_then_ends() -> None:
    store = MemoryStore()
    events = EventLog(store, ManualClock())
    await events.append("a", "one")
    (first,) = await store.events("a", after=0, limit=9)
    await events.append("b", "other")
    await events.append("a", "two")
    is_over = False
    seen: list[str | None] = []

    async def follow() -> None:
        async for event in events.follow("a", first.id, is_over=lambda: is_over, heartbeat_seconds=9.0):
            seen.append(event.type if event else None)

    task = asyncio.create_task(follow())
    await turns()
    assert seen == ["two"]
    await events.append("a", "three")
    is_over = True
    await events.append("a", "last")
    await asyncio.wait_for(task, 30.0)

    assert seen == ["two", "three", "last"]


async def test_a_follower_gets_a_heartbeat_when_nothing_happens() -> None:
    events = EventLog(MemoryStore(), ManualClock())
    follow = events.follow("a", 0, is_over=lambda: False, heartbeat_seconds=0.01)

    assert await anext(follow) is None
    await follow.aclose()  # type: ignore[attr-defined]
    assert events._followers == {}


async def test_facts_that_are_none_are_left_out_and_frames_bear_the_id() -> None:
    store = MemoryStore()
    await EventLog(store, ManualClock(0.0)).append("a", "checkpoint", step=3, reason=None)
    (event,) = await store.events("a", after=0, limit=9)

    assert event.data == {"step": 3}
    frame = frame_of(event)
    assert frame.startswith(f"id: {event.id}\nevent: checkpoint\ndata: {{")
    assert frame.endswith("}\n\n")
    assert frame_of(None) == ": nothing new\n\n"
