"""Several experiments train adapters in one process, on one base: each as if it were there alone."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flotilla.services.trainer.hosting.hosts import reason_not_shared
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.shared_bases import SharedBases
from flotilla.services.trainer.parallel.turns import ComputeTurns
from flotilla.services.trainer.worker.compute import Company
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import YesGateway, a_session, a_spec, save_tiny_model, train
from tests.integration.trainer.test_crash_replay import files_of

pytestmark = pytest.mark.slow

STEPS = 4
DIFFERENT: tuple[dict[str, Any], ...] = (
    {"lora": {"rank": 4, "dropout": 0.2}, "learning_rate": 1e-3, "seed": 3},
    {"lora": {"rank": 8, "targets": ["q_proj", "down_proj"]}, "learning_rate": 3e-3, "seed": 4},
)


def lora_spec(model: Path, lora: Mapping[str, Any], learning_rate: float, seed: int) -> ExperimentSpec:
    """Make an experiment that may share."""
    spec = a_spec(
        model,
        optimisation={"steps": STEPS, "groups_per_mini_batch": 2, "learning_rate": learning_rate},
        parallelism={"device": "cpu", "threads": 1},
    )
    adapted = spec.model.model_copy(update={"lora": LoraConfig(**lora), "dtype": "float32"})
    publication = spec.asynchrony.publication.model_copy(update={"lora": "adapters"})
    asynchrony = spec.asynchrony.model_copy(update={"publication": publication})
    spec = spec.model_copy(update={"seed": seed, "model": adapted, "asynchrony": asynchrony})
    assert reason_not_shared(spec) is None
    return spec


class Trained:
    """What an experiment has come to."""

    def __init__(self, spec: ExperimentSpec, directory: Path) -> None:
        self.spec, self.directory = spec, directory
        self.plane = MemoryDataPlane()
        self.gateway = YesGateway(self.plane)

    async def run(self, **surroundings: Any) -> "Trained":
        """Train to the end."""
        assert await train(self.spec, self.directory, self.plane, self.gateway, **surroundings)
        return self

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [self.gateway.metrics[step]["loss/total"] for step in range(1, STEPS + 1)]

    @property
    def files(self) -> dict[str, bytes]:
        """Adapters and optimiser after the last step."""
        return files_of(self.directory, STEPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("shared") / "model")


async def test_losses_and_moments_are_to_the_bit_those_of_each_alone(model: Path, tmp_path: Path) -> None:
    specs = [lora_spec(model, **fields) for fields in DIFFERENT]
    shared = {"company": Company(SharedBases(), ComputeTurns())}
    beside = [Trained(spec, tmp_path / f"beside{number}") for number, spec in enumerate(specs)]
    await asyncio.gather(*(each.run(**shared) for each in beside))

    for number, (spec, together) in enumerate(zip(specs, beside, strict=True)):
        alone = await Trained(spec, tmp_path / f"alone{number}").run()
        assert together.losses == alone.losses
        assert together.files == alone.files
        assert together.gateway.images == alone.gateway.images
    assert beside[0].losses != beside[1].losses


async def test_a_failing_experiment_changes_nothing_of_the_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (lora_spec(model, **fields) for fields in DIFFERENT)
    train_step = Learner.train

    def fail(learner: Learner, *given: Any) -> Any:
        if learner.spec.seed == bad.seed and given[1] == 2:
            raise ValueError("the loss of this experiment is no number")
        return train_step(learner, *given)

    alone = await Trained(good, tmp_path / "alone").run()
    monkeypatch.setattr(Learner, "train", fail)
    shared = {"company": Company(SharedBases(), ComputeTurns())}
    failing, beside = Trained(bad, tmp_path / "bad"), Trained(good, tmp_path / "beside")
    ended, _ = await asyncio.gather(failing.run(**shared), beside.run(**shared), return_exceptions=True)

    assert isinstance(ended, ExceptionGroup)
    assert ended.subgroup(ValueError) is not None
    assert beside.losses == alone.losses
    assert beside.files == alone.files


async def test_the_base_is_there_once_and_each_has_its_own_adapters(model: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"company": Company(SharedBases(), ComputeTurns())}
    specs = [lora_spec(model, **fields) for fields in DIFFERENT]
    planes = [MemoryDataPlane(), MemoryDataPlane()]
    one, other = (
        a_session(spec, tmp_path / str(at), plane, YesGateway(plane), **shared)
        for at, (spec, plane) in enumerate(zip(specs, planes, strict=True))
    )
    async with one as (first, _), other as (second, _):
        models = [each.loop._learner.loaded.model for each in (first, second)]  # type: ignore[attr-defined]
        before = [_places(each) for each in models]

    base, own = (before[0].keys() & before[1].keys()), [each.keys() for each in before]
    frozen = {name for name in base if "lora" not in name}
    assert frozen
    assert all(before[0][name] == before[1][name] for name in frozen)
    assert {name for each in own for name in each} - frozen == {name for each in own for name in each if "lora" in name}
    assert not {before[0][name] for name in own[0] - frozen} & {before[1][name] for name in own[1] - frozen}


def _places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
