"""No step is without figures that a checkpoint contains, whenever its worker was killed."""

import asyncio
from pathlib import Path
from typing import Any

from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.shared.errors import NotAssigned
from flotilla.shared.schemas.experiment import MetricBatch
from tests.unit.gateway.builders import running


class Gateway:
    """Notes the steps that are reported, while it is there."""

    def __init__(self, *, is_there: bool) -> None:
        self.steps: list[int] = []
        self.values: dict[str, float] = {}
        self._is_there = asyncio.Event()
        if is_there:
            self._is_there.set()

    async def call(self, _method: str, _path: str, *, body: Any = None, **_how: Any) -> Any:
        await self._is_there.wait()
        self.steps.append(body.step)
        self.values = dict(body.values)


def a_batch(step: int) -> MetricBatch:
    return MetricBatch(step=step, version=step, values={"loss": 1.0})


async def test_metrics_that_a_killed_worker_did_not_send_are_sent_by_the_next_one(tmp_path: Path) -> None:
    unsent = tmp_path / "unsent.jsonl"
    killed = Reporter(Gateway(is_there=False), "e", unsent)
    async with running(killed.run()):
        for step in (1, 2, 3):
            killed.metrics(a_batch(step))
        assert not await killed.flush(0.01)
    with unsent.open("a") as file:
        file.write('{"step": 4, "ver')

    gateway = Gateway(is_there=True)
    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        reporter.metrics(a_batch(3))
        assert await reporter.flush(2.0)

    assert gateway.steps == [1, 2, 3]
    assert not unsent.exists()


async def test_what_a_replaced_trainer_may_not_report_any_more_is_reported_by_the_next_one(tmp_path: Path) -> None:
    class Refusing(Gateway):
        async def call(self, _method: str, _path: str, *, body: Any = None, **_how: Any) -> Any:
            raise NotAssigned("another epoch")

    unsent = tmp_path / "unsent.jsonl"
    replaced = Reporter(Refusing(is_there=True), "e", unsent)
    async with running(replaced.run()):
        for step in (1, 2):
            replaced.metrics(a_batch(step))
        assert await replaced.flush(2.0)

    gateway = Gateway(is_there=True)
    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        assert await reporter.flush(2.0)

    assert replaced.is_replaced
    assert gateway.steps == [1, 2]


async def test_a_line_that_was_cut_off_costs_no_other_line(tmp_path: Path) -> None:
    unsent = tmp_path / "unsent.jsonl"
    unsent.write_bytes(b'{"step": 1, "values": {"l\xc3')
    for step in (1, 2):
        killed = Reporter(Gateway(is_there=False), "e", unsent)
        killed.resend(step)
        killed.metrics(a_batch(step))

    gateway = Gateway(is_there=True)
    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        assert await reporter.flush(2.0)

    assert gateway.steps == [1, 2]


async def test_what_is_kept_of_a_step_is_sent_once_by_the_next_worker_and_replaced_by_the_whole(tmp_path: Path) -> None:
    unsent = tmp_path / "unsent.jsonl"
    killed = Reporter(Gateway(is_there=False), "e", unsent)
    async with running(killed.run()):
        killed.keep(a_batch(1))
        killed.metrics(MetricBatch(step=1, version=1, values={"loss": 1.0, "time": 2.0}))
        killed.keep(a_batch(2))

    gateway = Gateway(is_there=True)
    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        assert await reporter.flush(2.0)

    assert gateway.steps == [1, 2]


async def test_what_is_kept_survives_that_everything_before_it_is_sent(tmp_path: Path) -> None:
    unsent = tmp_path / "unsent.jsonl"
    gateway = Gateway(is_there=True)
    killed = Reporter(gateway, "e", unsent)
    killed.metrics(a_batch(1))
    killed.keep(a_batch(2))
    async with running(killed.run()):
        assert await killed.flush(2.0)

    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        assert await reporter.flush(2.0)

    assert gateway.steps == [1, 1, 2]
    assert not unsent.exists()
