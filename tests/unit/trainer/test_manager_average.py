"""A moving average of the weights is exact over a restart, and becomes a model of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flotilla.services.trainer.checkpoint.export import export
from flotilla.services.trainer.checkpoint.manager import beginning, fill_alone, restored_from
from flotilla.shared.checkpoints.folders import AVERAGE, MODEL, StoredCheckpoint
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from tests.fleet import tiny_model
from tests.unit.trainer.builders import a_spec, uneven_groups
from tests.unit.trainer.test_lora import a_state

CPU = torch.device("cpu")
DECAY = 0.9


def spec_of(**model: object) -> ExperimentSpec:
    settings = {"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "average_decay": DECAY}
    return a_spec(model={"path": str(tiny_model())} | model, optimisation=settings)


def test_it_is_the_sum_that_its_definition_says_and_exact_over_a_restart(tmp_path: Path) -> None:
    learner = beginning(spec_of(), CPU).learner
    expected = {name: weight.detach().clone() for name, weight in learner.loaded.model.named_parameters()}
    for step in (1, 2, 3):
        if step == 3:
            folder = tmp_path / "step-00000002"
            folder.mkdir()
            fill_alone(learner, folder)
        learner.train(uneven_groups(2, seed=step), step)
        for name, weight in learner.loaded.model.named_parameters():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight.detach()
    assert learner.average is not None
    state = a_state(learner.spec, 2).model_copy(update={"files": {AVERAGE: 1}})

    restored = restored_from(learner.spec, StoredCheckpoint(2, folder, state), CPU).learner
    restored.train(uneven_groups(2, seed=3), 3)

    assert restored.average is not None
    again = restored.average.state()
    for name, average in learner.average.state().items():
        torch.testing.assert_close(average, expected[name], atol=1e-6, rtol=0)
        assert torch.equal(again[name], average), name


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}], ids=["weights", "adapters"])
def test_a_model_is_made_of_it(model: dict[str, object], tmp_path: Path) -> None:
    learner = beginning(spec_of(**model), CPU).learner
    learner.train(uneven_groups(2), 1)
    folder = tmp_path / "step"
    folder.mkdir()
    fill_alone(learner, folder)

    export(folder / MODEL, tmp_path / "averaged", averaged=True)

    assert learner.average is not None
    with torch.no_grad():
        for name, average in learner.average.state().items():
            dict(learner.loaded.model.named_parameters())[name].copy_(average)
    if learner.adapters is not None:
        learner.adapters.merge()
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, weight in learner.loaded.model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), atol=0, rtol=0)
    (folder / AVERAGE).unlink()
    with pytest.raises(InvalidRequest, match="average_decay"):
        export(folder / MODEL, tmp_path / "other", averaged=True)
