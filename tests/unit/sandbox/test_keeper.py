"""Which boxes a service has: what it takes, what it keeps for others, and what it takes away."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from flotilla.services.sandbox.boxes.executor import BoxExecutor
from flotilla.services.sandbox.boxes.keeper import LOOK_SECONDS, Boxes, Kept
from flotilla.services.sandbox.boxes.work import SLACK_SECONDS
from flotilla.services.sandbox.executor import Program
from flotilla.services.sandbox.guard.job import Phase
from flotilla.services.sandbox.isolation import Slot
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.providers.base import (
    BOX,
    OWNER,
    UNTIL,
    Box,
    Cause,
    Found,
    ProviderFailed,
    Wanted,
    is_orphan,
    owner_here,
)
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.shared.schemas.sandbox import SessionRequest

LIFETIME_SECONDS = SandboxSettings.model_fields["box_lifetime_seconds"].default
KEPT = Kept("usual", 0, 120.0, LIFETIME_SECONDS, memory_bytes=1 << 20, processors=1.0, processes=8, has_network=False)


class Memory:
    """A provider whose boxes are names; some cannot be taken away, and all may be gone."""

    kind: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self.boxes: dict[str, dict[str, str]] = {}
        self.wanted: list[Wanted] = []
        self.stuck: set[str] = set()
        self.executed: list[str] = []
        self.gone: set[str] = set()

    async def create(self, wanted: Wanted) -> Box:
        self.wanted.append(wanted)
        self.boxes[wanted.name] = wanted.labels("me")
        return Box(wanted.name, wanted.name, wanted.image, wanted.lifetime_seconds)

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        self.executed.append(box.id)
        if box.id in self.gone:
            raise ProviderFailed(Cause.LOST, "the box is gone")
        return 1

    async def write(self, box: Box, path: str, content: bytes) -> None: ...

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        return None

    async def destroy(self, box_id: str) -> None:
        if box_id in self.stuck:
            raise ProviderFailed(Cause.REFUSED, "it is stuck")
        self.boxes.pop(box_id, None)

    async def list(self) -> Sequence[Found]:
        return [Found(name, labels) for name, labels in self.boxes.items()]

    async def close(self) -> None: ...


def boxes_of(provider: Memory) -> Boxes:
    return Boxes(provider, KEPT, "me", now=lambda: 0.0)


async def warm(boxes: Boxes, number: int) -> list[Box]:
    made = [await boxes.take(None, 60.0) for _ in range(number)]
    boxes._warm.extend(made)
    return made


async def test_one_box_that_cannot_be_taken_away_keeps_no_other() -> None:
    provider = Memory()
    provider.boxes = {name: {OWNER: "me", BOX: name} for name in ("first", "second", "third")}
    provider.stuck = {"first"}
    boxes = boxes_of(provider)

    await boxes.look()

    assert list(provider.boxes) == ["first"]
    assert (boxes.num_orphans, boxes.failures[Cause.REFUSED]) == (2, 1)


async def test_a_start_does_not_fail_for_what_another_service_left() -> None:
    provider = Memory()
    provider.boxes = {"theirs": {OWNER: "another", BOX: "theirs", "flotilla-until": "1"}}
    provider.stuck = {"theirs"}
    boxes = boxes_of(provider)

    await boxes.open()
    await boxes.close()

    assert list(provider.boxes) == ["theirs"]


async def test_a_long_session_leaves_warm_boxes_to_others() -> None:
    boxes = boxes_of(Memory())
    kept = await warm(boxes, 2)

    taken = await boxes.take(None, LIFETIME_SECONDS + 60.0)

    assert taken not in kept and boxes.num_warm == 2
    assert await boxes.take(None, 60.0) is kept[0]


async def test_a_warm_box_serves_a_session_of_the_usual_life_for_as_long_as_it_is_kept() -> None:
    now = 0.0
    boxes = Boxes(Memory(), KEPT, "me", now=lambda: now)
    session = SessionRequest().lifetime_seconds + 2 * SLACK_SECONDS
    first, second = await warm(boxes, 2)

    assert await boxes.take(None, session) is first
    now = LIFETIME_SECONDS - KEPT.least_seconds + LOOK_SECONDS  # the latest that one may be left warm
    assert await boxes.take(None, session) is second


@pytest.mark.parametrize(("lifetime", "least"), [(600.0, 300.0), (3600.0, 1800.0), (6000.0, 4200.0)])
def test_a_box_is_kept_warm_for_half_an_hour_or_half_of_its_life(lifetime: float, least: float) -> None:
    assert replace(KEPT, lifetime_seconds=lifetime).least_seconds == least


@pytest.mark.parametrize(
    ("image", "seconds", "lifetime"),
    [("other", 70.0, 190.0), (None, 70.0, LIFETIME_SECONDS), (None, 7200.0, 7320.0)],
)
async def test_a_box_that_takes_long_to_come_lives_long_enough_afterwards(
    image: str | None, seconds: float, lifetime: float
) -> None:
    provider = Memory()

    await boxes_of(provider).take(image, seconds)

    assert [wanted.lifetime_seconds for wanted in provider.wanted] == [lifetime]


async def test_a_program_whose_warm_box_is_gone_runs_again_in_one_that_is_made_now() -> None:
    provider = Memory()
    boxes = boxes_of(provider)
    provider.gone = {box.id for box in await warm(boxes, 3)}
    program = Program({}, (Phase("run", ("true",), 1.0),), (), Limits())

    await BoxExecutor(boxes).run(Slot(0, None, Path()), program)

    assert provider.executed[0] in provider.gone
    assert provider.executed[1] not in provider.gone
    await boxes.close()


@pytest.mark.parametrize("until", ["\u00b2", "9" * 5000, "soon", "", "-1"])
@pytest.mark.parametrize("process", ["", ".", "\u00b2.1", "1.\u00b2", "9" * 5000 + ".1", "1"])
def test_labels_of_strangers_make_no_orphan(until: str, process: str) -> None:
    host = owner_here().partition(".")[0]

    assert not is_orphan(Found("b", {UNTIL: until, OWNER: f"{host}.{process}"}), "me", 2e9)
