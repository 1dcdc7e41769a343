"""A fork repeats its original, and more steps give what a longer run would have given, also when the trainer dies."""

import asyncio
import shutil
from pathlib import Path

import pytest

from flotilla.services.gateway.lifecycle.origins import find, take
from flotilla.services.trainer.checkpoint.manager import CheckpointManager
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.checkpoints.lineage import Published
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_spec, save_tiny_model, train
from tests.integration.trainer.test_crash_replay import Crash, crash_once, files_of

PER_STEP, FORKED_STEP, STEPS = 2, 3, 6


class LateFleet(ScriptedFleet):
    """Samples once the version that the experiment begins with can be pulled, as rollouts do."""

    async def run(self) -> None:
        async with asyncio.timeout(60):
            while self.gateway.version not in self.gateway.images:
                await asyncio.sleep(0.01)
        await super().run()


def spec_of(model: Path, steps: int = STEPS) -> ExperimentSpec:
    optimisation = {"steps": steps, "groups_per_mini_batch": PER_STEP, "learning_rate": 1e-3}
    return a_spec(model, optimisation=optimisation, checkpoint={"every_steps": 1, "keep": STEPS})


async def train_original(folder: Path) -> tuple[ExperimentSpec, YesGateway]:
    spec, plane = spec_of(save_tiny_model(folder / "model")), MemoryDataPlane()
    gateway = YesGateway(plane)
    assert await train(spec, folder / "original", plane, gateway)
    return spec, gateway


async def begin_fork(folder: Path, spec: ExperimentSpec) -> tuple[MemoryDataPlane, YesGateway]:
    """Do what the gateway does when it creates a fork."""
    origin = take(find(folder / "original", FORKED_STEP), spec, "fork", folder / "fork")
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)
    gateway.version, gateway.committed = origin.version, Published(origin.version, origin.step)
    await plane.admission.begin_at(origin.first_group_id)
    await plane.admission.published(origin.version)
    return plane, gateway


@pytest.mark.parametrize(
    ("owner", "name", "at_call"),
    [(None, "", 0), (CheckpointManager, "restore", 1), (ImagePool, "snapshot", 1), (Learner, "train", 2)],
    ids=["undisturbed", "as it begins", "before its first version", "after its first step"],
)
async def test_a_fork_is_its_original_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type | None, name: str, at_call: int
) -> None:
    spec, original = await train_original(tmp_path)
    plane, gateway = await begin_fork(tmp_path, spec)

    with monkeypatch.context() as patched:
        if owner is not None:
            crash_once(patched, owner, name, at_call=at_call)
            with pytest.raises((Crash, ExceptionGroup)):
                await train(spec, tmp_path / "fork", plane, gateway, LateFleet)
        assert await train(spec, tmp_path / "fork", plane, gateway, LateFleet)

    assert files_of(tmp_path / "fork", STEPS) == files_of(tmp_path / "original", STEPS)
    for step in range(FORKED_STEP + 1, STEPS + 1):
        assert gateway.metrics[step]["loss/total"] == original.metrics[step]["loss/total"]
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.planned) == ((STEPS - FORKED_STEP) * PER_STEP, 0)
    assert gateway.published == [4, 5, 6]


@pytest.mark.parametrize("dies", [False, True], ids=["in peace", "and the trainer dies"])
async def test_more_steps_give_what_a_longer_run_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    longer, _ = await train_original(tmp_path)
    shorter, plane = spec_of(tmp_path / "model", steps=FORKED_STEP), MemoryDataPlane()
    gateway = YesGateway(plane)
    assert await train(shorter, tmp_path / "extended", plane, gateway)

    with monkeypatch.context() as patched:
        if dies:
            crash_once(patched, CheckpointManager, "copy", at_call=2)
            with pytest.raises(ExceptionGroup):
                await train(longer, tmp_path / "extended", plane, gateway, LateFleet)
        assert await train(longer, tmp_path / "extended", plane, gateway, LateFleet)

    assert files_of(tmp_path / "extended", STEPS) == files_of(tmp_path / "original", STEPS)
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.planned) == (STEPS * PER_STEP, 0)


async def test_a_fork_without_a_checkpoint_does_not_begin_with_the_models_weights(tmp_path: Path) -> None:
    spec, _ = await train_original(tmp_path)
    begun = spec.model_copy(
        update={"checkpoint": spec.checkpoint.model_copy(update={"resume_from": f"original@{FORKED_STEP}"})}
    )
    plane, gateway = await begin_fork(tmp_path, begun)
    shutil.rmtree(tmp_path / "fork" / "checkpoints")

    with pytest.raises(ModelError, match=r"no checkpoint any more.*original@3"):
        await train(begun, tmp_path / "fork", plane, gateway, LateFleet)
