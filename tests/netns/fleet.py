"""A fleet on three hosts: Redis, gateway and reward on ``hub``, a rollout and a trainer on hosts of their own."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from flotilla.cli.redis_server import find_server
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.weights.image.files import HOST_ID
from tests.fleet import ROOT, make_experiment, until
from tests.netns.hosts import Hosts, RelayedHosts

PARTS = (
    "flotilla.services.rollout.engines.process.child",
    "flotilla.shared.weights.group.endpoint",
    "flotilla.services.trainer.worker",
)
"""What a service loads at the start of an experiment."""
END_SECONDS = 30.0
PORTS = (8470, 6379)
"""Of the gateway and of Redis."""


KINDS = ("gateway", "rollout", "reward", "trainer", "backup", "operator", "health")
"""Users of Redis."""


def shipped_users(passwords: Mapping[str, str]) -> str:
    """Read the list of users that is deployed, with these passwords."""
    text = (ROOT / "docker" / "users.acl").read_text(encoding="utf-8")
    for kind, password in passwords.items():
        text = text.replace(f"#{kind.upper()} ", f">{password} ")
    return text


class ThreeHosts:
    """The processes of such a fleet."""

    def __init__(
        self, hosts: Hosts | RelayedHosts, folder: Path, environment: Mapping[str, str], ports: tuple[int, int]
    ) -> None:
        self.hosts, self.folder = hosts, folder
        self.token = secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        hub = hosts.address("hub")
        self.port, self.redis_port = ports
        self.url = f"http://{hub}:{self.port}"
        self._environment = {
            **os.environ,
            "FLOTILLA_GATEWAY_URL": self.url,
            "FLOTILLA_TOKEN": self.token,
            "FLOTILLA_DATA": str(folder / "data"),
            "FLOTILLA_CODE_FOLDERS": str(folder),
            "FLOTILLA_LEASE_SECONDS": "15",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **environment,
        }

    def client(self) -> GatewayClient:
        """Make a client of the gateway, which reaches it whatever is cut."""
        return GatewayClient(self.url, self.token)

    def start(self, host: str, name: str, *, port: int = 0) -> None:
        """Start a service on a host."""
        own = {"FLOTILLA_HOST": self.hosts.address(host), "FLOTILLA_PORT": str(port), HOST_ID: host}
        # As where it is deployed: each kind has a user of its own in Redis.
        own["FLOTILLA_REDIS_URL"] = f"redis://{name}:{self.token}@{self.hosts.address('hub')}:{self.redis_port}/0"
        command = [sys.executable, "-P", "-m", f"flotilla.services.{name}"]
        log = self.folder / f"{host}-{name}.log"
        self.processes[host if name not in {"gateway", "reward"} else name] = self.hosts.start(
            host, command, self._environment | own, log
        )

    def start_redis(self) -> None:
        """Start the data plane's server."""
        (self.folder / "redis").mkdir()
        users = self.folder / "users.acl"
        users.write_text(shipped_users(dict.fromkeys(KINDS, self.token)))
        options = (
            "--bind",
            "0.0.0.0",
            "--appendonly",
            "yes",
            "--save",
            "",
            "--aclfile",
            str(users),
        )
        place = ("--dir", str(self.folder / "redis"), "--port", str(self.redis_port))
        command = [str(find_server()), *options, *place]
        self.processes["redis"] = self.hosts.start("hub", command, os.environ, self.folder / "redis.log")

    def loaded(self, host: str) -> dict[str, int]:
        """Find what the service of a host has loaded: process ids by module."""
        found = {}
        for child in psutil.Process(self.processes[host].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                found |= {part: child.pid for part in PARTS if part in words and part not in found}
        return found

    def end(self) -> None:
        """End all processes."""
        for name in reversed(self.processes):
            with suppress(ProcessLookupError):
                self.processes[name].send_signal(signal.SIGTERM)
        for name in reversed(self.processes):
            try:
                self.processes[name].wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(self.processes[name].pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                self.processes[name].kill()
                self.processes[name].wait()


@contextmanager
def three_hosts(
    hosts: Hosts | RelayedHosts,
    folder: Path,
    *,
    rollouts: tuple[str, ...],
    trainers: tuple[str, ...],
    ports: tuple[int, int] = PORTS,
    **environment: str,
) -> Iterator[ThreeHosts]:
    """Run a fleet for as long as the block lasts."""
    fleet = ThreeHosts(hosts, folder, environment, ports)
    try:
        fleet.start_redis()
        until(lambda: _accepts(hosts.address("hub"), fleet.redis_port), 60, "Redis")
        fleet.start("hub", "gateway", port=fleet.port)
        until(lambda: _accepts(hosts.address("hub"), fleet.port), 240, "the gateway")
        for host in trainers:
            fleet.start(host, "trainer")
        for host in rollouts:
            fleet.start(host, "rollout")
        fleet.start("hub", "reward")
        yield fleet
    finally:
        fleet.end()


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


class Watch:
    """Reads an experiment over and over: when steps came, and that the ledger was balanced each time."""

    def __init__(self, client: GatewayClient, experiment_id: str) -> None:
        self._client, self.path = client, f"/v1/experiments/{experiment_id}"
        self.experiment_id = experiment_id
        self.steps: list[tuple[float, int]] = []
        self.reads = 0
        self.causes: list[tuple[float, str]] = []

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            view: dict[str, Any] = await self._client.call("GET", self.path, deadline_seconds=20)
            assert view["state"] != "failed", view["problem"]
            ledger = (await self._client.call("GET", f"{self.path}/ledger", deadline_seconds=20))["train"]
            assert ledger["balanced"], ledger
            self.reads += 1
            if not self.steps or view["step"] > self.steps[-1][1]:
                self.steps.append((time.monotonic(), view["step"]))
            cause = (view.get("problem") or {}).get("cause")
            if cause is not None and (not self.causes or self.causes[-1][1] != cause):
                self.causes.append((time.monotonic(), cause))
            await asyncio.sleep(0.1)

    async def service_ids(self) -> set[str]:
        """List the services that are registered."""
        return {each["service_id"] for each in await self.services()}

    async def services(self) -> list[dict[str, Any]]:
        """List what is known of them."""
        listed = await self._client.call("GET", "/v1/services", deadline_seconds=20)
        return list(listed["items"])

    async def events(self, kind: str) -> list[dict[str, Any]]:
        """List what the events of a kind say."""
        listed = await self._client.call("GET", f"{self.path}/log", params={"types": kind}, deadline_seconds=20)
        return [each["data"] for each in listed["items"]]

    async def until_trainer_at(self, address: str, experiment_id: str | None, seconds: float) -> None:
        """Wait until a host's trainer is a member and works for an experiment, or for none."""
        async with asyncio.timeout(seconds):
            while not any(
                each["kind"] == "trainer" and address in each["address"] and each["experiment_id"] == experiment_id
                for each in await self.services()
            ):
                await asyncio.sleep(0.2)

    async def until_step_after(self, moment: float, seconds: float) -> float:
        """Wait for a step after a moment; return the seconds between."""
        async with asyncio.timeout(seconds):
            while not self.steps or self.steps[-1][0] <= moment:
                await asyncio.sleep(0.02)
        return next(when for when, _ in self.steps if when > moment) - moment

    async def until_step(self, step: int, seconds: float) -> None:
        """Wait for a step."""
        async with asyncio.timeout(seconds):
            while not self.steps or self.steps[-1][1] < step:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def a_trial(fleet: ThreeHosts, folder: Path, *, transport: str, **sections: Any) -> AsyncIterator[Watch]:
    """An experiment that learns, and is stopped afterwards."""
    spec = make_experiment(
        folder, optimisation={"steps": 100_000}, asynchrony={"publication": {"transport": transport}}, **sections
    )
    fleet.hosts.cut()
    async with fleet.client() as client:
        view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
        watch = Watch(client, view["id"])
        await client.call("POST", f"{watch.path}/start", deadline_seconds=60)
        reading = asyncio.create_task(watch.run())
        try:
            await watch.until_step(2, 120)
            yield watch
            assert not reading.done(), reading.exception()
        finally:
            fleet.hosts.cut()
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            await client.call("POST", f"{watch.path}/stop", deadline_seconds=60)
            async with asyncio.timeout(90):
                while (await client.call("GET", watch.path))["state"] == "stopping":
                    await asyncio.sleep(0.2)
