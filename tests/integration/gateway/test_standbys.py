"""Three gateways on one PostgreSQL: who leads is stopped and woken, who leads next is killed, and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.streams.hop import StreamKeys
from flotilla.shared.streams.redis.connection import connect
from tests.integration.gateway.fleet import (
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_spec,
    until,
)
from tests.postgres import new_database
from tests.postgres import postgres_url as postgres_url

STEPS = 24
TAKEOVER_SECONDS = 15.0
"""What is promised on an idle machine."""
START_SECONDS = 300.0
"""What processes need to start where others compute."""
BUSY = 4
"""How many times longer it may take where others compute."""
NO_LATER_TERM = """
CREATE TABLE terms (number SERIAL, term INTEGER);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO terms (term) VALUES (NEW.term); RETURN NEW; END $$;
CREATE TRIGGER note AFTER UPDATE ON last_transaction FOR EACH ROW EXECUTE FUNCTION note()
"""
"""Keeps in whose term each transaction was stored."""


class Gateways:
    """Processes of gateways that share everything.

    Attributes:
        database_url: of their database.
        urls: where each listens.
    """

    def __init__(self, folder: Path, redis_url: str, database_url: str, number: int) -> None:
        self._logs = folder
        self.database_url = database_url
        self.urls: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(number):
            port = lasting_port("127.0.0.1")
            environment = {
                **os.environ,
                "FLOTILLA_TOKEN": TOKEN,
                "FLOTILLA_REDIS_URL": redis_url,
                "FLOTILLA_DATABASE_URL": database_url,
                "FLOTILLA_DATA": str(folder / "data"),
                "FLOTILLA_DATA_FOLDERS": str(folder),
                "FLOTILLA_PORT": str(port),
            }
            url = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-P", "-m", "flotilla.services.gateway", "--standby"]
            with self._log_of(url).open("wb") as log:
                self._processes[url] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
                )
            self.urls.append(url)

    def _log_of(self, url: str) -> Path:
        return self._logs / f"{url.rpartition(':')[2]}.log"

    def log(self, url: str) -> str:
        """Read what one has said."""
        return self._log_of(url).read_text()

    def send(self, url: str, number: signal.Signals) -> None:
        """Send one a signal."""
        self._processes[url].send_signal(number)

    def exit_code(self, url: str) -> int | None:
        """Return with which code one has ended; None while it runs."""
        return self._processes[url].poll()

    async def health(self, url: str) -> str | None:
        try:
            async with httpx.AsyncClient() as client:
                return str((await client.get(f"{url}/healthz", timeout=1.0)).json()["status"])
        except httpx.HTTPError:
            return None

    async def leader(self, *others: str) -> str | None:
        """Find who leads among all but some."""
        for url in self.urls:
            if url not in others and await self.health(url) == "ok":
                return url
        return None

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def group(postgres_url: str, redis_url: str, tmp_path: Path) -> Iterator[Gateways]:
    """Three gateways on a database of their own."""
    started = Gateways(tmp_path, redis_url, new_database(postgres_url), 3)
    try:
        yield started
    finally:
        started.end()


async def exact_ledger(client: GatewayClient, path: str) -> dict[str, Any] | None:
    try:
        ledger: dict[str, Any] = (await client.call("GET", f"{path}/ledger", deadline_seconds=5.0))["train"]
    except FlotillaError:
        return None
    assert ledger["balanced"], ledger
    return ledger


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_leader_that_is_stopped_or_killed_costs_no_step_and_one_that_wakes_writes_nothing(
    group: Gateways, redis_url: str, tmp_path: Path
) -> None:
    import psycopg

    spec = a_spec(tmp_path, optimisation={"steps": STEPS, "groups_per_mini_batch": 2})
    first = await until(group.leader, START_SECONDS)
    for url in group.urls:
        await until(lambda url=url: group.health(url), START_SECONDS)
    with psycopg.connect(group.database_url, autocommit=True) as connection:
        connection.execute(NO_LATER_TERM.encode())
    everywhere = ",".join(group.urls)
    async with (
        GatewayClient(everywhere, TOKEN) as client,
        a_fleet(everywhere, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services,
    ):
        trainer = services[2]
        trainer.step_seconds = 0.2
        created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
        path = f"/v1/experiments/{created['id']}"
        await until(lambda: (trainer.step or 0) >= 3, START_SECONDS)

        group.send(first, signal.SIGSTOP)
        began = time.monotonic()
        second = await until(lambda: group.leader(first), START_SECONDS)
        stopped_seconds = time.monotonic() - began
        done = trainer.step
        await until(lambda: (trainer.step or 0) >= done + 2, START_SECONDS)
        group.send(first, signal.SIGCONT)
        code = await until(lambda: group.exit_code(first), START_SECONDS)
        await until(lambda: exact_ledger(client, path))

        group.send(second, signal.SIGKILL)
        began = time.monotonic()
        await until(lambda: group.leader(first, second), START_SECONDS)
        killed_seconds = time.monotonic() - began

        async def is_completed() -> bool:
            try:
                return bool((await client.call("GET", path, deadline_seconds=5.0))["state"] == "completed")
            except FlotillaError:
                return False

        await until(is_completed, START_SECONDS)
        ledger = await exact_ledger(client, path)
    with psycopg.connect(group.database_url) as connection:
        terms = [row[0] for row in connection.execute(b"SELECT term FROM terms ORDER BY number")]
    redis = connect(redis_url)
    lineage = await redis.hlen(StreamKeys(created["id"]).lineage)
    await redis.aclose()

    print(f"stopped: {stopped_seconds:.1f} s, killed: {killed_seconds:.1f} s")
    assert (code, "taken its place" in group.log(first)) == (2, True), group.log(first)[-2000:]
    assert ledger is not None
    assert (ledger["trained"], ledger["failed"]) == (2 * STEPS, {})
    assert lineage == STEPS
    assert [len(each) for each in trainer.trained] == [2] * STEPS, "no step is trained twice"
    assert len(set(terms)) == 3 and terms == sorted(terms), "who was deposed stores nothing"
    assert max(stopped_seconds, killed_seconds) < TAKEOVER_SECONDS * BUSY
