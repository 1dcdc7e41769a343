"""What is killed, stalls or is stopped costs no task: the ledger is asked after each fault."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.ports import lasting_port
from flotilla.shared.schemas.service import Failure, WorkState
from flotilla.shared.streams.hop import StreamsConfig
from tests.integration.gateway.fleet import (
    PATIENCE_SECONDS,
    TOKEN,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_fleet,
    a_gateway,
    a_spec,
    until,
)


async def started(client: GatewayClient, spec: dict[str, Any]) -> str:
    """Start an experiment; return its path."""
    created = await client.call("POST", "/v1/experiments", body=spec, params={"start": True})
    return f"/v1/experiments/{created['id']}"


async def wait_for(client: GatewayClient, path: str, *states: str, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
    """Wait until an experiment is in one of these states; show it."""

    async def look() -> dict[str, Any] | None:
        try:
            view: dict[str, Any] = await client.call("GET", path, deadline_seconds=5.0)
        except FlotillaError:
            return None
        return view if view["state"] in states else None

    found: dict[str, Any] = await until(look, seconds)
    return found


def optimisation(steps: int) -> dict[str, Any]:
    return {"steps": steps, "groups_per_mini_batch": 2}


async def test_stopping_resolves_what_is_outstanding_and_frees_the_services(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, gateway = served
    async with a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services:
        services[2].step_seconds = 0.1
        path = await started(client, a_spec(tmp_path, optimisation=optimisation(1000)))
        await until(lambda: services[2].step and services[2].step >= 2)
        await client.call("POST", f"{path}/pause")
        paused = await client.call("GET", path)
        await client.call("POST", f"{path}/resume")

        await client.call("POST", f"{path}/stop")
        view = await wait_for(client, path, "stopped")

        ledger = (await client.call("GET", f"{path}/ledger"))["train"]
        again = await started(client, a_spec(tmp_path))
        await wait_for(client, again, "completed")
    assert paused["state"] == "paused"
    assert (view["services"], view["problem"]) == ({}, None)
    assert ledger["balanced"] and ledger["outstanding"] == 0
    assert set(ledger["dropped"]) <= {"experiment_ended", "no_checkpoint"}
    assert gateway.repository.get(path.rsplit("/", 1)[1]).record.outcome == "stopped"


async def test_a_fatal_failure_is_shown_with_component_and_cause(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, _ = served
    async with a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services:
        services[2].step_seconds = 0.1
        path = await started(client, a_spec(tmp_path, optimisation=optimisation(1000)))
        await until(lambda: services[2].step)
        reward = services[1]

        reward.failure = Failure(component="reward", cause="the verifier's file has no function grade")
        reward.state = WorkState.FAILED
        reward.membership.notify()

        view = await wait_for(client, path, "failed")
        await until(lambda: all(each.experiment_id is None for each in services))

        async def final_ledger() -> Any:
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
            return ledger if ledger["outstanding"] == 0 else None

        ledger = await until(final_ledger)
    assert view["problem"]["component"] == "reward"
    assert view["problem"]["cause"] == "the verifier's file has no function grade"
    assert ledger["balanced"]


async def test_a_trainer_that_vanishes_is_replaced_and_nothing_is_trained_twice(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, gateway = served
    kinds = (ScriptedRollout, ScriptedReward, ScriptedTrainer)
    async with a_fleet(url, redis_url, *kinds) as services:
        first = services[2]
        first.waits_before = 4  # so that it vanishes from an experiment that is under way
        path = await started(client, a_spec(tmp_path, optimisation=optimisation(8)))
        await until(lambda: first.step == 3)
        async with a_fleet(url, redis_url, ScriptedTrainer) as [second]:
            await first.die()

            view = await wait_for(client, path, "completed", "failed")
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]

            assert view["state"] == "completed", view["problem"]
            assert gateway.repository.get(view["id"]).record.trainer_epoch == 2
            assert ledger["balanced"] and (ledger["trained"], ledger["outstanding"]) == (16, 0)
            groups = [group for step in [*first.trained, *second.trained] for group in step]
            assert len(groups) == len(set(groups))


async def test_a_rollout_that_does_not_answer_costs_a_publication_one_deadline(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, _ = served
    kinds = (ScriptedRollout, ScriptedRollout, ScriptedReward, ScriptedTrainer)
    async with a_fleet(url, redis_url, *kinds) as services:
        deaf = services[1]
        deaf.is_deaf = True
        spec = a_spec(tmp_path, optimisation=optimisation(2))
        spec["resources"] = {"rollouts": {"min": 2}}

        path = await started(client, spec)
        view = await wait_for(client, path, "completed", "failed")

        assert view["state"] == "completed", view["problem"]
        publications = (await client.call("GET", f"{path}/publications"))["items"]
    assert [each["phase"] for each in publications] == ["committed", "committed"]
    assert all([member["service_id"] for member in each["members"]] != [] for each in publications)
    assert all(deaf.id not in [m["service_id"] for m in each["members"]] for each in publications)
    assert all("did not join in time" in each["reason"] for each in publications)


async def test_a_rollout_that_dies_leaves_the_fleet_and_its_tasks_are_taken_over(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, gateway = served
    async with a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services:
        victim, _, trainer = services
        victim.is_stuck = True
        trainer.waits_before = 2  # or others might come to the end without the tasks that it holds
        path = await started(client, a_spec(tmp_path, optimisation=optimisation(6)))
        await until(lambda: victim.holds_tasks)
        async with a_fleet(url, redis_url, ScriptedRollout) as [other]:
            await until(lambda: other.state is WorkState.RUNNING)

            await victim.die()
            died = time.monotonic()

            async def is_over() -> bool:
                events = await gateway.store.events(path.rsplit("/", 1)[1], after=0, limit=1000)
                return {"service_left", "claims_released"} <= {event.type for event in events}

            await until(is_over)
            seconds = time.monotonic() - died
            trainer.waits_before = None
            view = await wait_for(client, path, "completed", "failed")

            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
    assert view["state"] == "completed", view["problem"]
    assert ledger["balanced"] and ledger["trained"] == 12
    assert seconds < StreamsConfig().lease_seconds / 2, "its claims did not wait for their leases"


class GatewayProcess:
    """The gateway as a process of its own, on a port that stays the same."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.port = lasting_port("127.0.0.1")
        self.environment = {
            **os.environ,
            "FLOTILLA_TOKEN": TOKEN,
            "FLOTILLA_REDIS_URL": settings.redis_url,
            "FLOTILLA_DATA": str(settings.data),
            "FLOTILLA_DATA_FOLDERS": str(settings.data.parent),
            "FLOTILLA_PORT": str(self.port),
        }
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "flotilla.services.gateway"]
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    async def ready(self, client: GatewayClient) -> None:
        """Wait until it answers; an interpreter that starts beside other work takes its time."""

        async def answers() -> bool:
            assert self.process is not None and self.process.poll() is None, "the gateway has ended"
            with contextlib.suppress(FlotillaError):
                await client.call("GET", "/readyz", deadline_seconds=5.0)
                return True
            return False

        await until(answers, PATIENCE_SECONDS)

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


def sent_to(tracked: Path) -> list[tuple[str, int, float]]:
    """List the points in a tracker's file: name, step, value."""
    lines = [json.loads(line) for line in tracked.read_text().splitlines()]
    return [(name, line["step"], value) for line in lines for name, value in line["values"].items()]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
async def test_a_gateway_that_comes_back_goes_on_where_it_was(
    settings: GatewaySettings, redis_url: str, tmp_path: Path, number: int
) -> None:
    process = GatewayProcess(settings)
    process.start()
    try:
        async with GatewayClient(process.url, TOKEN) as client:
            await process.ready(client)
            kinds = (ScriptedRollout, ScriptedReward, ScriptedTrainer)
            async with a_fleet(process.url, redis_url, *kinds) as services:
                trainer = services[2]
                trainer.step_seconds = 0.2
                trainer.waits_before = 5  # so that the fault meets an experiment that is under way
                evaluation = {"path": str(tmp_path / "heldout.jsonl"), "every_versions": 2}
                tracking = {"trackers": [{"kind": "jsonl", "directory": str(tmp_path / "tracked")}]}
                spec = a_spec(tmp_path, optimisation=optimisation(8), evaluation=evaluation, tracking=tracking)
                created = await client.call(
                    "POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=20.0
                )
                path = f"/v1/experiments/{created['id']}"
                tracked = tmp_path / "tracked" / created["id"] / "metrics.jsonl"
                await until(lambda: tracked.exists() and b'"loss"' in tracked.read_bytes(), PATIENCE_SECONDS)
                ids = {service.id for service in services}

                process.end(number)
                with tracked.open("ab") as file:  # as if it had been killed within a write
                    file.write(b'{"step":99,"values":')
                trainer.waits_before = None
                await asyncio.sleep(0.5)
                process.start()
                await process.ready(client)
                view = await wait_for(client, path, "completed", "failed")

                ledger = await client.call("GET", f"{path}/ledger")

                async def has_all() -> bool:
                    """Whether the tracker's file has every point as it is now: some follow the last step."""
                    metrics = (await client.call("GET", f"{path}/metrics", params={"limit": 1000}))["items"]
                    return {(name, step): value for name, step, value in sent_to(tracked)} == {
                        (each["name"], each["step"]): each["value"] for each in metrics
                    }

                await until(has_all, PATIENCE_SECONDS)
                assert {service.id for service in services} == ids, "nobody had to register again"
        assert view["state"] == "completed", view["problem"]
        assert (view["step"], view["policy_version"]) == (8, 8)
        assert ledger["train"]["balanced"] and ledger["evaluation"]["balanced"]
        assert (ledger["train"]["trained"], ledger["train"]["outstanding"]) == (16, 0)
        groups = [group for step in trainer.trained for group in step]
        assert sorted(groups) == sorted(set(groups)) and trainer.lags == [0] * 16
        # Memory is measured on, at the step that it is at: such points are replaced.
        sent = [(name, step) for name, step, _ in sent_to(tracked) if not name.startswith("memory/")]
        assert len(sent) == len(set(sent)), "each once"
    finally:
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"FLOTILLA_PORT": "PORT"}, "is in use"),
        ({"FLOTILLA_REDIS_URL": "redis://127.0.0.1:1/0"}, "no Redis server answers"),
        ({"FLOTILLA_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "the database does not answer"),
        ({"FLOTILLA_TOKEN": ""}, "FLOTILLA_TOKEN"),
    ],
)
def test_a_gateway_that_cannot_start_says_why_in_one_sentence(
    settings: GatewaySettings, broken: dict[str, str], words: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        changes = {name: port if value == "PORT" else value for name, value in broken.items()}
        environment = GatewayProcess(settings).environment | {"FLOTILLA_PORT": "0"} | changes

        ended = subprocess.run(
            [sys.executable, "-m", "flotilla.services.gateway"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    assert ended.returncode == 2
    assert words in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_a_second_gateway_on_the_same_data_is_refused_until_the_first_is_dead(settings: GatewaySettings) -> None:
    first = GatewayProcess(settings)
    first.start()
    try:
        async with GatewayClient(first.url, TOKEN) as client:
            await first.ready(client)
            environment = first.environment | {"FLOTILLA_PORT": "0"}
            command = [sys.executable, "-P", "-m", "flotilla.services.gateway"]

            second = await asyncio.to_thread(
                subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60
            )

            assert second.returncode == 2, second.stderr
            assert "another gateway works on this database" in second.stderr and second.stderr.count("\n") == 1
            first.end(signal.SIGKILL)
            first.start()
            await first.ready(client)
    finally:
        assert first.end(signal.SIGTERM) == 0


async def test_a_data_plane_that_is_killed_and_comes_back_costs_time_and_no_task(tmp_path: Path) -> None:
    with LocalRedis(tmp_path / "redis") as server:
        settings = GatewaySettings(token=TOKEN, redis_url=server.url, data=tmp_path / "data", teardown_seconds=5.0)
        async with (
            a_gateway(settings) as (url, _),
            GatewayClient(url, TOKEN) as client,
            a_fleet(url, server.url, ScriptedRollout, ScriptedReward, ScriptedTrainer) as services,
        ):
            trainer = services[2]
            trainer.waits_before = 4
            path = await started(client, a_spec(tmp_path, optimisation=optimisation(8)))
            await until(lambda: trainer.step == 3)

            server.kill()
            async with httpx.AsyncClient(base_url=url) as http:
                ready = await http.get("/readyz", timeout=PATIENCE_SECONDS)
            trainer.waits_before = None
            await asyncio.to_thread(server.start)

            view = await wait_for(client, path, "completed", "failed")
            ledger = (await client.call("GET", f"{path}/ledger"))["train"]
    assert ready.status_code == 503 and "Redis" in ready.json()["detail"]
    assert view["state"] == "completed", view["problem"]
    assert ledger["balanced"] and ledger["outstanding"] == 0
