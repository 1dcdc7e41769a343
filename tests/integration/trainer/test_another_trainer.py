"""Two real trainers on the groups of one live run: each with its own ledger, and equal settings give equal losses."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.feeder.opening import open_subscribed
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.trainer.learning.learner import Learner
from flotilla.shared.clock import SystemClock
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model, train
from tests.integration.trainer.test_crash_replay import Crash, files_of
from tests.integration.trainer.test_from_dump import losses_of
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, add_experiment

STEPS = 6
SOURCE, TAKER = "source-1", "taker-1"


def spec_of(model: Path, *, max_lag: int = 20, **sections: Any) -> ExperimentSpec:
    sections = {"optimisation": {"steps": STEPS, "groups_per_mini_batch": 4, "learning_rate": 1e-2}} | sections
    ahead = {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 2, "max_lag": max_lag}
    return a_spec(model, asynchrony=ahead, algorithm={"old_log_probs": "recompute"}, **sections)


@dataclass
class Pair:
    """Two experiments of one gateway, of which the second trains the groups of the first."""

    folder: Path
    source: Experiment
    taker: Experiment
    source_gateway: YesGateway
    taker_gateway: YesGateway

    def plane(self, experiment: Experiment) -> MemoryDataPlane:
        assert isinstance(experiment.train, MemoryDataPlane)
        return experiment.train

    async def feed(self) -> None:
        """Take groups as the gateway does."""

        async def never(_source: Experiment) -> None:
            raise AssertionError("the source has not ended")

        status = FeederStatus()
        feeder = open_subscribed(
            self.taker,
            MemoryStore(),
            SystemClock(),
            status,
            source=lambda: self.source,
            has_caught_up=lambda _: True,
            on_end=never,
        )
        await feeder.run()

    async def train_source(self, make_fleet: type[ScriptedFleet] = ScriptedFleet) -> bool:
        plane = self.plane(self.source)
        return await train(self.source.spec, self.folder / SOURCE, plane, self.source_gateway, make_fleet)

    async def train_taker(self) -> bool:
        plane, gateway = self.plane(self.taker), self.taker_gateway
        read = self.source.train.admission.published_version
        directory = self.folder / TAKER
        async with a_session(self.taker.spec, directory, plane, gateway, source_version=read) as (session, _):
            return await session.run()

    async def ledgers(self) -> tuple[Ledger, Ledger]:
        ledgers = await self.source.train.ledger(), await self.taker.train.ledger()
        assert all(each.balanced for each in ledgers)
        return ledgers


async def a_pair(folder: Path, make: Callable[..., ExperimentSpec], **changes: Any) -> Pair:
    gateway = a_gateway(planes=MemoryPlanes())
    document = partial(ExperimentSpec.model_dump, mode="json")
    source = await add_experiment(gateway, SOURCE, spec=document(make()))
    taker = await add_experiment(gateway, TAKER, spec=document(make(data={"from": SOURCE, "path": None}, **changes)))
    await source.train.sharing.subscribe(TAKER)
    return Pair(folder, source, taker, YesGateway(source.train), YesGateway(taker.train))


async def test_equal_settings_give_equal_losses_also_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await a_pair(tmp_path, partial(spec_of, save_tiny_model(tmp_path / "model")))
    assert await pair.train_source()
    feeding = asyncio.create_task(pair.feed())

    calls, whole = 0, Learner.train

    def crash_at_the_fourth(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Crash
        return whole(*arguments)

    monkeypatch.setattr(Learner, "train", crash_at_the_fourth)
    async with asyncio.timeout(240):
        with pytest.raises(ExceptionGroup) as failure:
            await pair.train_taker()
        assert await pair.train_taker()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)

    assert failure.group_contains(Crash)
    assert without_lags(losses_of(pair.taker_gateway)) == without_lags(losses_of(pair.source_gateway)), (
        "to the last bit"
    )
    assert files_of(tmp_path / TAKER, STEPS) == files_of(tmp_path / SOURCE, STEPS), "weights, too"
    of_source, of_taker = await pair.ledgers()
    assert of_source.trained == of_taker.trained == 4 * STEPS
    assert (of_taker.failed, of_taker.filtered, of_taker.dropped) == ({}, {}, {})


async def test_another_rate_and_other_steps_learn_from_the_same_groups(tmp_path: Path) -> None:
    pair = await a_pair(
        tmp_path,
        partial(spec_of, save_tiny_model(tmp_path / "model")),
        optimisation={"steps": 4, "groups_per_mini_batch": 6, "learning_rate": 3e-3},
    )
    assert await pair.train_source()
    feeding = asyncio.create_task(pair.feed())
    async with asyncio.timeout(240):
        assert await pair.train_taker()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)

    of_source, of_taker = await pair.ledgers()
    assert of_source.trained == of_taker.trained == 24
    assert losses_of(pair.taker_gateway)[1] != losses_of(pair.source_gateway)[1]


async def test_what_is_older_than_max_lag_is_never_trained(tmp_path: Path) -> None:
    pair = await a_pair(tmp_path, partial(spec_of, save_tiny_model(tmp_path / "model"), max_lag=2))
    assert await pair.train_source()
    newest = await pair.source.train.admission.published_version()
    assert newest == 3
    feeding = asyncio.create_task(pair.feed())
    training = asyncio.create_task(pair.train_taker())

    async with asyncio.timeout(60):
        while not (await pair.taker.train.ledger()).trained + (await pair.taker.train.ledger()).planned:
            await asyncio.sleep(0.05)
    for task in (training, feeding):
        task.cancel()
    await asyncio.gather(training, feeding, return_exceptions=True)

    _, ledger = await pair.ledgers()
    assert ledger.dropped["stale"] > 0
    taken = [each for plan in pair.plane(pair.taker)._store.plans.values() for each in [plan.oldest_version]]
    assert taken and min(taken) >= newest - 2


def without_lags(losses: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {name: v for name, v in of.items() if not name.startswith("lag/")} for step, of in losses.items()}
