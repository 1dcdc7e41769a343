"""The ledger as the gateway sends it is what its clients read."""

from types import SimpleNamespace
from typing import Any, cast

from flotilla.client.asynchronous import Ledgers
from flotilla.services.gateway.routes.facts import ledger
from flotilla.shared.clock import ManualClock
from flotilla.shared.testing.builders import a_task
from tests.unit.gateway.builders import a_gateway, add_experiment


async def test_a_client_reads_what_is_on_its_way_with_its_age() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    await experiment.train.admission.issue_many([a_task(number) for number in range(3)], limit=9)
    gateway.feeder_status.of(experiment).issued.add(0, clock.monotonic())
    clock.advance(2.5)
    jobs = cast(Any, SimpleNamespace(is_one=lambda _: False))

    read = Ledgers.read(await ledger(experiment.id, gateway, jobs))

    (queue,) = read.train.by_version
    assert (queue.groups, queue.first_group, queue.oldest_seconds) == (3, 0, 2.5)
    assert read.evaluation.by_version == ()
