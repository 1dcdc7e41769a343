"""Which steps a version contains, and which is the first."""

from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.records.repository import step_of
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.streams.hop import HopName
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment


@pytest.mark.parametrize(("version", "step"), [(0, 0), (12, 12), (13, 14)])
async def test_a_forks_first_version_contains_the_steps_of_its_origin(version: int, step: int) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    origin = {"experiment_id": "first-1", "step": 12, "version": 12, "path": "p", "first_group_id": 0}
    record = replace(experiment.record, origin=origin, policy_version=13, published_step=14)

    assert await step_of(gateway.store, record, version) == step


@pytest.mark.parametrize(
    ("lora", "version"), [(None, 0), ({"rank": 4}, 0), ({"rank": 4, "quantisation": {"dtype": "nf4"}}, 1)]
)
async def test_nothing_is_sampled_with_weights_that_the_trainer_has_packed_since(
    lora: dict[str, object] | None, version: int, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n' * 8)
    gateway = a_gateway(data=tmp_path)
    spec = a_spec(model={"path": str(tmp_path / "model"), "lora": lora}, data={"path": str(tmp_path / "train.jsonl")})
    experiment = await gateway.commands.create(spec.model_dump_json())
    await gateway.repository.update(experiment, state=ExperimentState.RUNNING)
    rows = Dataset([{"prompt": "1?", "label": "1"}], spec.data, 0)
    feeder = Feeder(
        experiment, RowOrder(experiment, rows), gateway.store, gateway.clock, gateway.feeder_status.of(experiment)
    )

    await feeder.feed()

    [claim, *_] = await experiment.train.hop(HopName.TASKS, "rollout").claim(9, wait_seconds=0)
    assert claim.task().min_version == version
    assert await step_of(gateway.store, experiment.record, version) == 0
