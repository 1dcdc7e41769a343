"""A trainer that dies anywhere between plan and checkpoint comes back and trains exactly what it would have trained."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.trainer.checkpoint.host_copy import HostCopy
from flotilla.services.trainer.checkpoint.manager import CheckpointManager
from flotilla.services.trainer.checkpoint.storage import CheckpointStorage
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.worker.checkpoint_policy import CheckpointWriter
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.errors import ClaimLost
from flotilla.shared.models.weight_files import checksum_of, safetensors_files
from flotilla.shared.schemas.publication import PublicationRequest
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model, train

pytestmark = pytest.mark.long


class Crash(Exception):
    """Stands for a power cut."""


def crash_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, at_call: int) -> None:
    """Let the ``at_call``-th call of a method raise, once."""
    original = getattr(owner, name)
    calls = 0

    def called(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise Crash(name)
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, called)


def files_of(run: Path, step: int) -> dict[str, bytes]:
    directory = run / "checkpoints" / f"step-{step:08d}"
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.suffix == ".safetensors"
    }


@pytest.mark.parametrize(
    ("owner", "name", "at_call"),
    [
        (Learner, "train", 4),
        (Learner, "train", 1),
        (ImagePool, "snapshot", 3),
        (CheckpointManager, "copy", 2),
        (HostCopy, "write", 2),
        (CheckpointStorage, "_move", 2),
        (CheckpointWriter, "commit", 2),
    ],
    ids=[
        "planned, not trained",
        "in the first step",
        "trained, not published",
        "published, not copied",
        "copied, not on the disk",
        "on the disk, not whole",
        "whole, not committed",
    ],
)
async def test_parameters_after_a_crash_are_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at_call: int
) -> None:
    spec = a_spec(save_tiny_model(tmp_path / "model"), optimisation={"steps": 6, "groups_per_mini_batch": 2})
    undisturbed = MemoryDataPlane()
    await train(spec, tmp_path / "undisturbed", undisturbed, YesGateway(undisturbed))
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)

    with monkeypatch.context() as patched:
        crash_once(patched, owner, name, at_call=at_call)
        with pytest.raises(ExceptionGroup) as failure:
            await train(spec, tmp_path / "run", plane, gateway)
        after_crash = await plane.ledger()
        is_finished = await train(spec, tmp_path / "run", plane, gateway)

    assert failure.group_contains(Crash)
    assert after_crash.balanced
    assert is_finished
    assert files_of(tmp_path / "run", 6) == files_of(tmp_path / "undisturbed", 6)
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.planned) == (12, 0)
    assert gateway.published == [1, 2, 3, 4, 5, 6]


class ManifestsGateway(YesGateway):
    """Remembers checksum and base of each version."""

    def __init__(self, plane: Any) -> None:
        super().__init__(plane)
        self.manifests: dict[int, tuple[str, str | None]] = {}

    async def call(self, method: str, path: str, *, body: Any = None, **arguments: Any) -> Any:
        if isinstance(body, PublicationRequest):
            self.manifests[body.manifest.version] = body.manifest.checksum, body.manifest.base
        return await super().call(method, path, body=body, **arguments)


async def test_adapters_after_a_crash_are_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model")
    spec = a_spec(path, optimisation={"steps": 4, "groups_per_mini_batch": 2, "learning_rate": 1e-3})
    adapted = spec.model.model_copy(update={"lora": LoraConfig(rank=4, dropout=0.2)})
    alone = spec.asynchrony.publication.model_copy(update={"lora": "adapters"})
    asynchrony = spec.asynchrony.model_copy(update={"publication": alone})
    spec = spec.model_copy(update={"model": adapted, "asynchrony": asynchrony})
    undisturbed = MemoryDataPlane()
    first = ManifestsGateway(undisturbed)
    await train(spec, tmp_path / "undisturbed", undisturbed, first)
    plane = MemoryDataPlane()
    gateway = ManifestsGateway(plane)

    with monkeypatch.context() as patched:
        crash_once(patched, Learner, "train", at_call=4)
        with pytest.raises(ExceptionGroup):
            await train(spec, tmp_path / "run", plane, gateway)
        assert await train(spec, tmp_path / "run", plane, gateway)

    found, expected = files_of(tmp_path / "run", 4), files_of(tmp_path / "undisturbed", 4)
    assert found.keys() == {"model/adapter_model.safetensors", "optimizer.safetensors"}
    assert found == expected
    assert gateway.manifests == first.manifests, "the same adapters of each version, on the same base"
    assert {base for _, base in gateway.manifests.values()} == {checksum_of(safetensors_files(path))}


async def test_an_earlier_trainer_is_fenced_off(tmp_path: Path) -> None:
    spec = a_spec(save_tiny_model(tmp_path / "model"))
    plane = MemoryDataPlane()
    gateway = YesGateway(plane)

    async with (
        a_session(spec, tmp_path / "run", plane, gateway) as (earlier, _),
        a_session(spec, tmp_path / "run", plane, gateway),
    ):
        with pytest.raises(ExceptionGroup) as failure:
            await earlier.run()

    assert failure.group_contains(ClaimLost)


async def test_durability_step_commits_each_step_at_once(tmp_path: Path) -> None:
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        optimisation={"steps": 3, "groups_per_mini_batch": 2},
        checkpoint={"every_steps": 3, "durability": "step"},
    )
    plane = MemoryDataPlane()
    committed: list[int] = []

    class Watching(YesGateway):
        async def call(self, method: str, path: str, **arguments: Any) -> Any:
            if path.endswith("/metrics"):
                committed.append((await plane.ledger()).trained)
            return await super().call(method, path, **arguments)

    await train(spec, tmp_path / "run", plane, Watching(plane))

    assert committed == [2, 4, 6]


class SilentGateway(YesGateway):
    """Answers no announcement, as one that is unavailable."""

    async def call(self, method: str, path: str, *, body: Any = None, **arguments: Any) -> Any:
        if isinstance(body, PublicationRequest):
            await asyncio.Event().wait()
        return await super().call(method, path, body=body, **arguments)


@pytest.mark.parametrize("is_over", [True, False])
async def test_between_two_versions_the_last_stop_leaves_a_checkpoint(tmp_path: Path, is_over: bool) -> None:
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        optimisation={"steps": 9, "groups_per_mini_batch": 2},
        asynchrony={"trigger_parameter_sync_step": 3, "staleness_threshold": 1.0},
        checkpoint={"every_steps": 9},
    )
    plane = MemoryDataPlane()
    gateway = SilentGateway(plane)
    fleet = ScriptedFleet(spec, plane, gateway)
    async with a_session(spec, tmp_path / "run", plane, gateway) as (session, control), asyncio.timeout(240):
        working = asyncio.create_task(fleet.run())
        training = asyncio.create_task(session.run())
        while 4 not in gateway.metrics:
            await asyncio.sleep(0.005)
        control.stop(is_over=is_over)
        assert not await training
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    last = max(gateway.metrics)
    assert last % 3
    ledger = await plane.ledger()
    assert ledger.balanced
    assert ledger.trained == (2 * last if is_over else 0)
    assert ledger.planned - (0 if is_over else 2 * last) in {0, 2}, "the next step may have been planned"
    assert gateway.checkpoints == ([last] if is_over else [])
