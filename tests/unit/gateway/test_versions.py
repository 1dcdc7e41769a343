"""Which steps a version contains."""

from dataclasses import replace

import pytest

from services.gateway.records.versions import step_of
from tests.unit.gateway.builders import a_gateway, add_experiment


@pytest.mark.parametrize(("version", "step"), [(0, 0), (12, 12), (13, 14)])
async def test_a_forks_first_version_contains_the_steps_of_its_origin(version: int, step: int) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    origin = {"experiment_id": "first-1", "step": 12, "version": 12, "path": "p", "first_group_id": 0}
    record = replace(experiment.record, origin=origin, policy_version=13, published_step=14)

    assert await step_of(gateway.store, record, version) == step
