"""What a room keeps of an experiment lives as long as the experiment."""

import gc

from flotilla.services.gateway.records.repository import PerExperiment
from flotilla.shared.schemas.experiment import ExperimentState
from tests.unit.gateway.builders import a_gateway, add_experiment


async def test_each_experiment_has_one_of_its_own() -> None:
    gateway = a_gateway()
    one, two = await add_experiment(gateway, "one"), await add_experiment(gateway, "two")
    kept: PerExperiment[list[str]] = PerExperiment(list)

    kept.of(one).append("seen")

    assert kept.of(one) is kept.of(one)
    assert (kept.of(one), kept.of(two)) == (["seen"], [])


async def test_it_goes_when_the_experiment_is_deleted() -> None:
    gateway = a_gateway()
    await add_experiment(gateway, "one", state=ExperimentState.STOPPED)
    gateway.measurements.of(gateway.repository.get("one")).lags.add_step(1, {"lag/tokens/0": 3.0})
    assert len(gateway.measurements) == 1

    async def delete() -> None:
        async with gateway.store.transaction() as change:
            gateway.repository.stage_removal(change, "one")

    await delete()
    gc.collect()

    assert len(gateway.measurements) == 0


async def test_nobody_is_woken_by_what_is_only_shown() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    gateway.wake.clear()
    changed = experiment.changed.next

    await gateway.repository.update(experiment, step=3)
    await gateway.repository.update(experiment, health=[])

    assert (experiment.record.step, changed.done(), gateway.wake.is_set()) == (3, False, False)

    await gateway.repository.update(experiment, step=4, policy_version=1)

    assert changed.done() and gateway.wake.is_set()
