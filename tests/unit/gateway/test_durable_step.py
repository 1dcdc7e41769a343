"""What is durable is what lies on the disk, as far as the gateway sees it."""

import json
from pathlib import Path

import pytest

from flotilla.services.gateway.store.writes import PutCheckpoint
from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, CheckpointState
from flotilla.shared.schemas.experiment import CheckpointView
from tests.unit.gateway.builders import a_gateway, add_experiment


def write(directory: Path, step: int) -> None:
    folder = directory / CHECKPOINTS / f"step-{step:08d}"
    folder.mkdir(parents=True)
    facts = {"experiment_id": "tiny-1", "step": step, "version": step, "updates": step, "trained": [], "seed": 0}
    rest = {"kl_coefficient": None, "totals": {}, "spec": {}, "software": {}, "files": {}}
    (folder / STATE_FILE).write_text(CheckpointState.model_validate(facts | rest).model_dump_json())


@pytest.mark.parametrize(("on_disk", "in_sql", "durable"), [((5, 10), (5,), 10), ((5,), (5, 10), 5), ((), (10,), 10)])
async def test_the_disk_decides_and_the_database_where_there_is_none(
    tmp_path: Path, on_disk: tuple[int, ...], in_sql: tuple[int, ...], durable: int
) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, directory=str(tmp_path))
    for step in on_disk:
        write(tmp_path, step)
    for step in in_sql:
        view = CheckpointView(step=step, version=step, path="p", at="2026-01-01T00:00:00Z")
        async with gateway.store.transaction() as change:
            change.write(PutCheckpoint(experiment.id, view))

    assert await gateway.repository.durable_step(experiment) == durable


async def test_where_a_newer_release_wrote_the_newest_the_database_says_what_is_durable(tmp_path: Path) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, directory=str(tmp_path))
    for step in (5, 10):
        write(tmp_path, step)
    state = tmp_path / CHECKPOINTS / "step-00000010" / STATE_FILE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"tides": 3}))
    view = CheckpointView(step=10, version=10, path="p", at="2026-01-01T00:00:00Z")
    async with gateway.store.transaction() as change:
        change.write(PutCheckpoint(experiment.id, view))

    assert await gateway.repository.durable_step(experiment) == 10
