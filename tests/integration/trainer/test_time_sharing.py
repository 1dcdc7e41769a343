"""The real trainer takes turns with a sampler: it has no weights in memory meanwhile, and learns the same bits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.feeder.admission import admitted
from flotilla.services.gateway.registry.shifts import FIRST_SHIFT, Need, holder_of, is_clear, next_shift
from flotilla.services.trainer.worker.session import Session
from flotilla.shared.schemas.service import DeviceOrder, DeviceReport, ServiceKind
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model, train


class SharingFleet(ScriptedFleet):
    """Samples in its own shifts alone, and moves the shift as the gateway does."""

    session: Session
    shift = FIRST_SHIFT
    samplings = 0

    async def turn(self) -> None:
        trainer = self.session.device.report()
        spec, ledger = self.spec, await self.plane.ledger()
        wanted = {"steps": spec.optimisation.steps, "groups_per_step": spec.groups_per_step}
        room = admitted(ledger, budget=spec.admission_budget, **wanted)
        work = bool(ledger.waiting.tasks or ledger.claimed.tasks or room)
        mine = DeviceReport(shift=self.shift, is_held=False)
        self.shift = next_shift(self.shift, {"trainer": trainer}, {"rollout": mine}, Need(work))
        is_mine = holder_of(self.shift) is ServiceKind.ROLLOUT
        self.session.device.take(DeviceOrder(shift=self.shift, may_hold=not is_mine))
        if is_mine and is_clear(self.shift, [trainer]):
            learner: Any = self.session.loop._learner
            assert max(each.untyped_storage().nbytes() for each in learner.loaded.model.parameters()) < 1 << 16
            self.samplings += 1
            await super().turn()
        else:
            await asyncio.sleep(0.001)


async def train_in_turns(spec: Any, directory: Path, plane: MemoryDataPlane) -> tuple[SharingFleet, YesGateway]:
    gateway = YesGateway(plane)
    fleet = SharingFleet(spec, plane, gateway)
    async with a_session(spec, directory, plane, gateway) as (session, _), asyncio.timeout(240):
        fleet.session = session
        session.device.take(DeviceOrder(shift=FIRST_SHIFT, may_hold=True))
        beside = [asyncio.create_task(each) for each in (session.device.run(), fleet.run())]
        try:
            assert await session.run()
        finally:
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    return fleet, gateway


def weights_of(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors").read_bytes()


async def test_on_policy_it_learns_what_it_learns_side_by_side(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    side, turns = MemoryDataPlane(), MemoryDataPlane()
    quiet = YesGateway(side)
    await train(a_spec(model), tmp_path / "side", side, quiet)

    spec = a_spec(model, resources={"sharing": "time"})
    fleet, gateway = await train_in_turns(spec, tmp_path / "turns", turns)

    assert fleet.samplings >= 5 and fleet.shift >= 2 * 5
    assert weights_of(tmp_path / "turns", 5) == weights_of(tmp_path / "side", 5)
    for step in range(1, 6):
        assert gateway.metrics[step]["loss/total"] == quiet.metrics[step]["loss/total"]


@pytest.mark.parametrize("steps_per_version", [1, 2])
async def test_stale_samples_are_trained_and_none_is_lost(tmp_path: Path, steps_per_version: int) -> None:
    plane = MemoryDataPlane()
    spec = a_spec(
        save_tiny_model(tmp_path / "model"),
        resources={"sharing": "time"},
        optimisation={"steps": 6, "groups_per_mini_batch": 2},
        asynchrony={"staleness_threshold": 1.0, "trigger_parameter_sync_step": steps_per_version},
    )

    fleet, _ = await train_in_turns(spec, tmp_path / "turns", plane)

    ledger = await plane.ledger()
    assert ledger.balanced
    assert ledger.trained == 6 * 2
    assert fleet.shift > 2
