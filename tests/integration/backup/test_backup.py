"""A backup that is taken while a fleet works restores elsewhere to a ledger that balances, whatever part is older."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.backup.keys import restore_keys, summary_of
from flotilla.backup.parts import Stores, lines_of, make_backup, restore_backup
from flotilla.backup.rows import experiments_of
from flotilla.cli.redis_server import LocalRedis
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.errors import Conflict, FlotillaError, InvalidRequest, NotLeading
from flotilla.shared.locations.allowed import GRANTS
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.streams.redis.plane import RedisDataPlane
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_gateway,
    a_spec,
    until,
)

ROUNDS = int(os.environ.get("BACKUP_ROUNDS", "2"))
KINDS = (ScriptedRollout, ScriptedRollout, ScriptedReward, ScriptedTrainer)
FURTHER_STEPS = 2
"""Of the restored fleet, each round."""
PATIENCE_SECONDS = 300.0


def settings_of(folder: Path, redis_url: str) -> GatewaySettings:
    return GatewaySettings(token=TOKEN, redis_url=redis_url, data=folder / "data", grace_seconds=1.0, lease_seconds=2.0)


def stores_of(settings: GatewaySettings) -> Stores:
    return Stores(settings.data, settings.resolved_database_url, settings.redis_url)


def quiet(_line: str) -> None:
    pass


@pytest.fixture
def other_redis(tmp_path: Path) -> Any:
    """Another server, elsewhere."""
    with LocalRedis(tmp_path / "other-redis") as server:
        yield server.url


@asynccontextmanager
async def at_work(settings: GatewaySettings) -> AsyncIterator[tuple[GatewayClient, ScriptedTrainer]]:
    """A gateway and a fleet on the stores."""
    async with (
        a_gateway(settings) as (url, _),
        GatewayClient(url, TOKEN) as client,
        a_fleet(url, settings.redis_url, *KINDS) as services,
    ):
        services[-1].step_seconds = 0.02
        yield client, services[-1]


def versions_ahead(backup: Path, experiment_id: str) -> int:
    """Count the versions that the database of a backup knows beyond the steps that its data plane has resolved."""
    row = next(each for each in experiments_of(backup / "database") if each.id == experiment_id)
    plane = summary_of(backup / "redis" / f"{experiment_id}.jsonl")
    assert plane is not None
    return max(0, row.policy_version - plane.committed)


async def train_further(settings: GatewaySettings, experiment_id: str, ahead: int) -> None:
    """Train some steps on restored stores; the ledger balances whenever it is read."""
    path = f"/v1/experiments/{experiment_id}"
    async with at_work(settings) as (client, trainer):
        trainer.versions_ahead = ahead

        async def is_further() -> bool:
            try:
                ledger = (await client.call("GET", f"{path}/ledger"))["train"]
            except FlotillaError:
                return False
            assert ledger["balanced"], ledger
            return len(trainer.trained) >= FURTHER_STEPS

        await until(is_further, PATIENCE_SECONDS)
    redis = connect(settings.redis_url)
    ledger = await RedisDataPlane(redis, experiment_id, Lane.TRAIN).ledger()
    await redis.flushdb()
    await redis.aclose()
    assert ledger.balanced, ledger


@pytest.mark.timeout(1800)
async def test_a_backup_that_is_taken_under_load_restores_elsewhere_to_a_balanced_ledger(
    redis_url: str, other_redis: str, tmp_path: Path
) -> None:
    here = settings_of(tmp_path / "here", redis_url)
    spec = a_spec(tmp_path, optimisation={"steps": 100_000, "groups_per_mini_batch": 2})
    backups = [tmp_path / f"backup-{number}" for number in range(ROUNDS + 1)]
    async with at_work(here) as (client, trainer):
        created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
        for backup in backups:
            reached = (trainer.step or 0) + 2
            await until(lambda reached=reached: (trainer.step or 0) >= reached, PATIENCE_SECONDS)
            await make_backup(stores_of(here), backup, quiet)
    first, last = backups[0], backups[-1]
    mixed = {"database": tmp_path / "older-database", "redis": tmp_path / "older-redis"}
    for part, folder in mixed.items():
        shutil.copytree(last, folder)
        shutil.rmtree(folder / part)
        shutil.copytree(first / part, folder / part)

    for folder in (*backups[1:], *mixed.values()):
        there = settings_of(tmp_path / f"there-{folder.name}", other_redis)
        await restore_backup(folder, stores_of(there), quiet)
        await train_further(there, created["id"], versions_ahead(folder, created["id"]))


@pytest.mark.timeout(600)
async def test_a_restore_refuses_stores_that_are_not_empty_and_folders_that_are_no_backup(
    redis_url: str, other_redis: str, tmp_path: Path
) -> None:
    here, there = settings_of(tmp_path / "here", redis_url), settings_of(tmp_path / "there", other_redis)
    spec = a_spec(tmp_path)
    backup = tmp_path / "backup"
    async with a_gateway(here) as (url, _), GatewayClient(url, TOKEN) as client:
        created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
        (here.data / GRANTS).write_text("/code/grade.py")
        await make_backup(stores_of(here), backup, quiet)
        with pytest.raises(Conflict, match="is there already"):
            await make_backup(stores_of(here), backup, quiet)
        with pytest.raises(InvalidRequest, match="token"):
            await make_backup(stores_of(here), tmp_path / "other", quiet, with_token=True)
        with pytest.raises(Conflict, match="restore to another data directory"):
            await restore_backup(backup, stores_of(here), quiet)
        elsewhere = replace(stores_of(here), data=tmp_path / "elsewhere", redis_url=other_redis)
        with pytest.raises(NotLeading):
            await restore_backup(backup, elsewhere, quiet)
    redis = connect(other_redis)
    await redis.set(f"{{exp:{created['id']}}}:state", "another's")
    with pytest.raises(Conflict, match="has keys of"):
        await restore_keys(other_redis, [created["id"]], backup / "redis")
    await redis.flushdb()
    await redis.aclose()
    with pytest.raises(InvalidRequest, match="no complete backup"):
        await restore_backup(tmp_path / "other.partial", stores_of(there), quiet)
    await restore_backup(backup, stores_of(there), quiet, with_rights=True)
    assert (there.data / GRANTS).read_text() == "/code/grade.py", "what the fleet may run"
    assert created["id"] in lines_of(backup)[0]
    assert (backup.stat().st_mode & 0o777) == 0o700
