"""The real trainer alone, fed from the samples of a run: the losses of that run, and the same bits after a crash."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.datasets.loading import load_dump
from flotilla.services.gateway.datasets.made import FROM_DUMP, DumpedGroups
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.samples.dump import dump_at
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import Claim, HopName, Resolution
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import (
    ScriptedFleet,
    YesGateway,
    a_session,
    a_spec,
    answer,
    save_tiny_model,
    train,
)
from tests.integration.trainer.test_crash_replay import Crash, crash_once, files_of

STEPS = 6
AHEAD: dict[str, Any] = {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 2}


class FilteringFleet(ScriptedFleet):
    """Filters every fifth group, so that ids of trained groups have gaps."""

    async def turn(self) -> None:
        for claim in await self._generated.claim(16, wait_seconds=0.0):
            await self._judge(claim)
        await self._fill()
        for claim in await self._tasks.claim(1, wait_seconds=0.02):
            self._load_newest()
            group = answer(self.model, claim.task(), self.model_version, self.spec.rollout.sampling.max_new_tokens)
            await self._tasks.forward(claim, group)

    async def _judge(self, claim: Claim) -> None:
        if claim.header.group_id % 5 == 1:
            await self._generated.resolve(claim, Resolution.FILTERED, "same_reward")
        else:
            await self._generated.forward(claim, claim.group())


def spec_of(model: Path, **sections: Any) -> ExperimentSpec:
    return a_spec(
        model,
        optimisation={"steps": STEPS, "groups_per_mini_batch": 4, "learning_rate": 1e-2},
        asynchrony=AHEAD,
        algorithm={"old_log_probs": "recompute", "kl": {"placement": "loss"}},
        **sections,
    )


async def feed(spec: ExperimentSpec, plane: MemoryDataPlane) -> None:
    """Issue groups of the dump as the feeder does."""
    dataset, maker = load_dump(spec.data, spec.reward, seed=spec.seed), DumpedGroups(Path(spec.data.dump or ""))
    while True:
        number = await plane.admission.next_group_id()
        groups = maker.groups(dataset, range(number, number + 4))
        issued = await plane.admission.issue_groups(groups, hop=HopName.SCORED, limit=spec.admission_budget)
        if issued.outcome is not IssueOutcome.ISSUED:
            await asyncio.sleep(0.01)


async def train_alone(spec: ExperimentSpec, directory: Path, plane: MemoryDataPlane, gateway: YesGateway) -> bool:
    async with a_session(spec, directory, plane, gateway) as (session, _), asyncio.timeout(240):
        feeding = asyncio.create_task(feed(spec, plane))
        try:
            return await session.run()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


def losses_of(gateway: YesGateway) -> dict[int, dict[str, float]]:
    return {
        step: {
            name: value
            for name, value in values.items()
            if name.startswith(("loss/", "reward/", "advantage/", "ratio/", "kl/", "lag/", "entropy"))
            or name == "grad_norm"
        }
        for step, values in gateway.metrics.items()
    }


async def test_a_trainer_alone_has_the_losses_of_the_run_whose_samples_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "model")
    live_gateway = YesGateway(live_plane := MemoryDataPlane())
    assert await train(spec_of(model), tmp_path / "live", live_plane, live_gateway, FilteringFleet)
    assert sum((await live_plane.ledger()).filtered.values()) > 1
    dumped = [dump_at(tmp_path / "live").group(index).task.group_id for index in range(4 * STEPS)]
    assert dumped != list(range(4 * STEPS)), "ids of the live run have gaps"

    # The same spec with one more key, and a trainer that is killed in the middle.
    spec = spec_of(model, data={"dump": str(tmp_path / "live")})
    assert (spec.samples_answers, spec.needs_rollouts, spec.trains) == (False, False, True)
    crash_once(monkeypatch, Learner, "train", at_call=4)
    gateway = YesGateway(plane := MemoryDataPlane())
    with pytest.raises(ExceptionGroup) as failure:
        await train_alone(spec, tmp_path / "alone", plane, gateway)
    assert await train_alone(spec, tmp_path / "alone", plane, gateway)

    assert failure.group_contains(Crash)
    assert losses_of(gateway) == losses_of(live_gateway), "to the last bit"
    assert files_of(tmp_path / "alone", STEPS) == files_of(tmp_path / "live", STEPS), "weights, too"
    ledger = await plane.ledger()
    assert ledger.balanced
    assert (ledger.trained, ledger.dropped, ledger.failed) == (4 * STEPS, {}, {})
    again = [dump_at(tmp_path / "alone").group(index).task for index in range(4 * STEPS)]
    assert [task.group_id for task in again] == list(range(4 * STEPS))
    assert [task.metadata[FROM_DUMP]["group_id"] for task in again] == dumped


async def test_versions_of_a_dump_are_another_runs(tmp_path: Path) -> None:
    """Groups of late versions are trained from the first step on: none is too old, too new, or of a lost version."""
    model = save_tiny_model(tmp_path / "model")
    gateway = YesGateway(plane := MemoryDataPlane())
    assert await train(spec_of(model), tmp_path / "live", plane, gateway)
    late = tmp_path / "live" / "samples" / f"step-{STEPS:08d}.parquet"
    assert dump_at(late).group(3).version_range()[1] > 0

    spec = spec_of(model, data={"dump": str(late)})
    gateway = YesGateway(plane := MemoryDataPlane())
    assert await train_alone(spec, tmp_path / "alone", plane, gateway)

    ledger = await plane.ledger()
    assert (ledger.trained, ledger.dropped, ledger.failed) == (4 * STEPS, {}, {}), "six epochs of one step's groups"
