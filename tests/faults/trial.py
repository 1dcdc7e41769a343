"""One experiment on a whole fleet, as tests of its membership look at it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from redis.asyncio import Redis

from flotilla.cli.fleet import LEASE_SECONDS
from flotilla.connection import FleetInfo
from flotilla.shared.errors import NotFound
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import ServiceView
from flotilla.shared.streams.hop import CONSUMER_GROUP, HopName, StreamKeys
from tests.fleet import FLOTILLA, ROOT, RunningFleet, is_running, running_fleet

STEP_SECONDS = 0.015
"""What a step of an engine takes at least, so that the engines that load meanwhile get their share of few cores."""
SLOW_ENGINE = "engine.step slow in=engine seconds=0.06"
ENGINE = f"engine.step slow in=engine seconds={STEP_SECONDS}"
MAX_LAG = 2
"""What a staleness threshold of a half comes to."""
PATIENCE_SECONDS = 240
"""For what has to come, on a machine with much else to do; a minute suffices where it has not."""


class Trial:
    """One experiment of a fleet, and what its services say."""

    def __init__(self, fleet: RunningFleet, client: GatewayClient, view: dict[str, Any]) -> None:
        self.fleet = fleet
        self.client = client
        self.id: str = view["id"]
        self.path = f"/v1/experiments/{self.id}"

    @classmethod
    async def start(cls, fleet: RunningFleet, client: GatewayClient, spec: dict[str, Any]) -> "Trial":
        """Create and start an experiment."""
        view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
        await client.call("POST", f"/v1/experiments/{view['id']}/start", deadline_seconds=60)
        return cls(fleet, client, view)

    async def version(self) -> int:
        """Its committed version."""
        view: dict[str, Any] = await self.client.call("GET", self.path)
        assert view["state"] == "running", view
        return int(view["policy_version"])

    async def rollouts(self) -> dict[int, ServiceView]:
        """List the rollouts that serve it, by process id."""
        listed = await self.client.call("GET", "/v1/services", params={"kind": "rollout"})
        views = [ServiceView.model_validate(item) for item in listed["items"]]
        return {
            view.pid: view
            for view in views
            if is_running(view.pid)
            and view.observed.experiment_id == self.id
            and view.observed.policy_version is not None
        }

    async def until_served_by(self, num: int) -> dict[int, ServiceView]:
        """Wait for so many rollouts that serve it."""

        async def are_there() -> dict[int, ServiceView] | None:
            found = await self.rollouts()
            return found if len(found) == num else None

        found: dict[int, ServiceView] = await waited(are_there, PATIENCE_SECONDS, f"{num} rollouts that serve")
        return found

    async def seconds_to_next_version(self, victim: int) -> float:
        """Kill -9 a rollout, and measure until all others serve a version that was not committed then."""
        os.kill(victim, signal.SIGKILL)
        started = time.monotonic()
        before = await self.version()
        others = set(await self.rollouts()) - {victim}

        async def is_served() -> bool:
            found = await self.rollouts()
            return all(pid in found and (found[pid].observed.policy_version or 0) > before for pid in others)

        assert others
        await waited(is_served, PATIENCE_SECONDS, f"a version after {before}")
        return time.monotonic() - started

    async def publication(self, version: int) -> dict[str, Any] | None:
        """Look at a publication; None before it is announced."""
        try:
            found: dict[str, Any] = await self.client.call("GET", f"{self.path}/publications/{version}")
        except NotFound:
            return None
        return found

    async def until_phase(self, version: int, phase: str) -> dict[str, Any]:
        """Wait until a publication is in a phase."""

        async def is_in_it() -> dict[str, Any] | None:
            found = await self.publication(version)
            return found if found is not None and found["phase"] == phase else None

        what = f"publication {version} to be {phase}"
        found: dict[str, Any] = await waited(is_in_it, PATIENCE_SECONDS, what, pause_seconds=0.005)
        return found

    async def until_it_claims(self, pid: int) -> None:
        """Wait until a rollout claims a task: all of its answer is to come."""
        before = await self.held_by(pid)

        async def has_claimed() -> bool:
            return bool(await self.held_by(pid) - before)

        await waited(has_claimed, PATIENCE_SECONDS, f"a new claim of {pid}", pause_seconds=0.01)

    async def until_it_samples(self, pid: int) -> ServiceView:
        """Wait until a rollout has counted tokens that it sampled since this was called."""

        async def view_with(num_tokens: float) -> ServiceView | None:
            view = (await self.rollouts()).get(pid)
            return view if view and view.observed.load.get("generated_tokens", 0) > num_tokens else None

        num_tokens = 0.0
        # The first count may be older than the call, and the second one's tokens sampled before it.
        for _ in range(3):
            view: ServiceView = await waited(partial(view_with, num_tokens), PATIENCE_SECONDS, f"tokens of {pid}")
            num_tokens = view.observed.load["generated_tokens"]
        return view

    async def held_by(self, pid: int) -> set[bytes]:
        """List the tasks that a rollout has claimed."""
        return {entry["message_id"] for entry in await self._held() if holder_of(entry) == f"rollout-{pid}"}

    async def until_one_holds(self, num: int, pids: set[int]) -> int:
        """Wait until one of these rollouts has claimed so many tasks; gives its process id."""

        async def who_does() -> int | None:
            holders = [holder_of(entry) for entry in await self._held()]
            return next((pid for pid in pids if holders.count(f"rollout-{pid}") >= num), None)

        found: int = await waited(who_does, PATIENCE_SECONDS, f"{num} claims of one of {pids}", pause_seconds=0.01)
        return found

    async def _held(self) -> list[dict[str, Any]]:
        stream = StreamKeys(self.id).stream(HopName.TASKS)
        async with Redis.from_url(FleetInfo.read(self.fleet.data).redis_url) as redis:
            held: list[dict[str, Any]] = await redis.xpending_range(stream, CONSUMER_GROUP, "-", "+", 200)
        return held

    async def is_registered(self, pid: int) -> bool:
        """Whether a process is a rollout of the fleet, with or without work."""
        listed = await self.client.call("GET", "/v1/services", params={"kind": "rollout"})
        return any(item["pid"] == pid for item in listed["items"])

    async def has_begun_to_leave(self, service_id: str) -> bool:
        """Whether a rollout says that it drains, or is gone already."""
        try:
            view = await self.client.call("GET", f"/v1/services/{service_id}")
        except NotFound:
            return True
        return bool(view["observed"]["state"] in {"draining", "finished"})

    async def events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Read type and data of each event from the first on; ends with the experiment."""
        async with httpx.AsyncClient(base_url=self.fleet.url, timeout=30) as http:
            headers = {"Authorization": f"Bearer {self.fleet.token}"}
            async with http.stream("GET", f"{self.path}/events", headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                        yield event["type"], event["data"]

    async def left(self, service_id: str) -> dict[str, Any]:
        """Read the event that says what a service handed over when it left."""
        async with contextlib.aclosing(self.events()) as events:
            async for kind, facts in events:
                if kind == "service_left" and facts["service_id"] == service_id:
                    return facts
        raise AssertionError(f"{service_id} has not left")

    async def num_released(self) -> int:
        """Count the claims of the dead that were released, of an experiment that has ended."""
        return sum([int(facts["claims"]) async for kind, facts in self.events() if kind == "claims_released"])

    async def stop(self) -> None:
        """Stop it, and wait until it has."""

        async def has_stopped() -> bool:
            return bool((await self.client.call("GET", self.path))["state"] == "stopped")

        await self.client.call("POST", f"{self.path}/stop")
        await waited(has_stopped, PATIENCE_SECONDS, "the stop")

    async def metric(self, name: str) -> list[float]:
        """All values of a metric."""
        answer = await self.client.call("GET", f"{self.path}/metrics", params={"names": name, "limit": 10_000})
        return [point["value"] for point in answer["items"]]

    async def num_resumed(self) -> float:
        """Count the trained tokens that came from an earlier rollout than the one that answered."""
        return sum(await self.metric("tokens/resumed_in_step"))

    async def trained(self) -> Counter[int]:
        """Count how often each group was planned to be trained."""
        view = await self.client.call("GET", self.path)
        steps = range(1, view["step"] + 1)
        plans = [await self.client.call("GET", f"{self.path}/steps/{step}") for step in steps]
        return Counter(group for plan in plans for group in plan["group_ids"])


def holder_of(entry: dict[str, Any]) -> str:
    """Read who has claimed an entry: a rollout, or the place of what was handed back."""
    name: str = entry["consumer"].decode().partition("@")[0]
    return name


async def waited(look: Callable[[], Awaitable[Any]], seconds: float, what: str, *, pause_seconds: float = 0.05) -> Any:
    """Look until there is something, with a deadline."""
    end = time.monotonic() + seconds
    while True:
        found = await look()
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        await asyncio.sleep(pause_seconds)


def two_rollouts(data: Path, faults: str) -> AbstractContextManager[RunningFleet]:
    return running_fleet(data, rollouts=2, FLOTILLA_LEASE_SECONDS=LEASE_SECONDS, FLOTILLA_FAULTS=faults)


@contextmanager
def joining(data: Path, log: Path, *options: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Join a fleet by starting a process, as a user does."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*FLOTILLA, "rollout", "--data", str(data), *options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "FLOTILLA_LEASE_SECONDS": LEASE_SECONDS, **environment},
        )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was found
                each.kill()
        process.kill()
        process.wait()


async def check_what_was_trained(trial: Trial) -> None:
    """Nothing twice, nothing too old."""
    trained = await trial.trained()
    lags = await trial.metric("lag/max")
    assert trained
    assert max(trained.values()) == 1
    assert lags
    assert max(lags) <= MAX_LAG


def report(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.2f} s")
