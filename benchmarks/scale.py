"""One gateway and many services: latency of the long poll, CPU and memory per service, and how each grows.

The gateway is the real process on a real server, with 10,000 tasks of one experiment outstanding. The services are
simulated by asyncio clients of this process over loopback: each registers, keeps its long poll open, acknowledges
what it is told and polls again, and pushes its state once in ten seconds, as ``shared/membership.py`` does. Measured
for each number of services:

- *push*: how long an observation without waiting takes, at the services' ordinary rhythm;
- *change*: from the request that pauses or resumes the experiment until each service has read its new desired state;
- CPU of the gateway in per cent of one core while nothing changes, and its memory.

``python -m benchmarks.scale [--quick] [--services 10,100,1000] [--tasks 10000] [--seconds 10] [--json FILE]``
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from flotilla.cli.redis_server import LocalRedis
from shared.client import GatewayClient
from shared.errors import NotFound
from shared.processes import python_module
from shared.schemas.service import Registration, ServiceKind
from tests.fleet import make_experiment, until

TOKEN = "scale-benchmark"
TASKS = 10_000
POLL_SECONDS = 10
PUSH_SECONDS = 10.0
BAR_SECONDS = 1.0
PATIENCE_SECONDS = 90.0


class Simulated:
    """One service: a kept connection for its poll, another for its pushes."""

    def __init__(self, address: str, number: int, kind: ServiceKind) -> None:
        self._host, self._port = urlsplit(address).hostname, urlsplit(address).port
        self._number, self.kind = number, kind
        self.id = ""
        self._tag: str | None = None
        self._desired: dict[str, Any] = {"state": "idle"}
        self.told_at: dict[str, float] = {}
        """Desired state -> when it was read last."""
        self.push_seconds: list[float] = []
        self.lost_leases = 0
        self._reader: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def run(self) -> None:
        """Register, then poll and push until cancelled."""
        await self._register()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._poll())
                tasks.create_task(self._push())
        finally:
            for use in list(self._reader):
                await self._close(use)

    async def _register(self) -> None:
        registration = Registration(
            kind=self.kind,
            address=f"http://127.0.0.1:{20000 + self._number}",
            host="simulated",
            pid=self._number + 1,
            incarnation=f"simulated-{self._number}-{self.lost_leases}",
        )
        answer = await self._call("poll", "POST", "/v1/services", registration.model_dump(mode="json"))
        self.id, self._tag = answer["service_id"], None

    def _observed(self) -> dict[str, Any]:
        assignment = self._desired.get("assignment")
        return {
            "acknowledged": self._tag,
            "experiment_id": assignment and assignment["experiment_id"],
            "state": self._desired["state"],
            "policy_version": 0 if assignment and self.kind is ServiceKind.ROLLOUT else None,
            "step": 0 if assignment and self.kind is ServiceKind.TRAINER else None,
            "load": {"running": 1, "waiting": 0, "tokens_per_second": 1000.0},
        }

    async def _poll(self) -> None:
        while True:
            answer = await self._status("poll", POLL_SECONDS)
            if answer["tag"] != self._tag:
                self._tag, self._desired = answer["tag"], answer
                self.told_at[answer["state"]] = time.monotonic()

    async def _push(self) -> None:
        await asyncio.sleep(PUSH_SECONDS * (self._number % 97) / 97)
        while True:
            started = time.monotonic()
            await self._status("push", 0)
            self.push_seconds.append(time.monotonic() - started)
            await asyncio.sleep(PUSH_SECONDS)

    async def _status(self, use: str, wait: int) -> dict[str, Any]:
        called_as = self.id
        try:
            return await self._call(use, "PUT", f"/v1/services/{called_as}/status?wait={wait}", self._observed())
        except NotFound:
            # The gateway was too slow to take its renewals in.
            if called_as == self.id:
                self.lost_leases += 1
                await self._register()
            return await self._status(use, wait)

    async def _close(self, use: str) -> None:
        _, writer = self._reader.pop(use)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _call(self, use: str, method: str, path: str, body: Any) -> dict[str, Any]:
        # The gateway closes a connection that was idle for some seconds.
        if use in self._reader and self._reader[use][0].at_eof():
            await self._close(use)
        if use not in self._reader:
            self._reader[use] = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._reader[use]
        content = json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        if method == "POST":
            head += f"Idempotency-Key: simulated-{self._number}-{self.lost_leases}\r\n"
        writer.write(head.encode() + b"\r\n" + content)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line.split(":")[1] for line in answered.split("\r\n") if line.startswith("content-length:"))
        answer: dict[str, Any] = json.loads(await reader.readexactly(int(length)))
        if answered.split(" ")[1] == "404":
            raise NotFound(answer["detail"])
        if not answered.split(" ")[1].startswith("2"):
            raise RuntimeError(f"{method} {path}: {answer}")
        return answer


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run a gateway with a server of its own."""
    with LocalRedis(directory / "redis") as server:
        environment = {
            **os.environ,
            "FLOTILLA_TOKEN": TOKEN,
            "FLOTILLA_REDIS_URL": server.url,
            "FLOTILLA_DATA": str(directory / "data"),
            "FLOTILLA_CODE_FOLDERS": str(directory),
            "FLOTILLA_PORT": "0",
            "FLOTILLA_LOG_LEVEL": "WARNING",
        }
        log = directory / "gateway.log"
        with log.open("wb") as errors, (directory / "address").open("wb") as address:
            process = subprocess.Popen(  # noqa: ASYNC220
                python_module("services.gateway"), env=environment, stdout=address, stderr=errors
            )
        try:
            await asyncio.to_thread(
                until,
                lambda: (directory / "address").read_text().endswith("\n") or process.poll() is not None,
                30,
                "it",
            )
            if process.poll() is not None:
                raise SystemExit(f"the gateway did not start: {log.read_text()}")
            yield (directory / "address").read_text().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)


def spec_of(directory: Path, num_tasks: int) -> dict[str, Any]:
    """Make an experiment whose budget admits all the tasks at once."""
    spec = make_experiment(directory)
    groups = spec["optimisation"]["groups_per_mini_batch"]
    spec["optimisation"]["steps"] = 2 * num_tasks // groups
    spec["asynchrony"] = {"staleness_threshold": num_tasks / groups - 1}
    return spec


async def measure(
    num_services: int, directory: Path, changes: int, *, num_tasks: int = TASKS, quiet_seconds: float = PUSH_SECONDS
) -> dict[str, Any]:
    """Measure one number of services, on a gateway of its own."""
    async with gateway(directory) as (address, process), GatewayClient(address, TOKEN) as client:
        memory_before = process.memory_info().rss
        kinds = [ServiceKind.TRAINER, ServiceKind.REWARD] + [ServiceKind.ROLLOUT] * (num_services - 2)
        services = [Simulated(address, number, kind) for number, kind in enumerate(kinds)]
        spec = await asyncio.to_thread(spec_of, directory, num_tasks)
        running = [asyncio.create_task(each.run()) for each in services]
        try:
            joining = time.monotonic()
            while not all(each.id for each in services):
                _check(running, joining + PATIENCE_SECONDS, "services to register")
                await asyncio.sleep(0.02)
            joined = time.monotonic() - joining
            view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
            path = f"/v1/experiments/{view['id']}"
            await client.call("POST", f"{path}/start", deadline_seconds=60)
            outstanding = await _until_outstanding(client, path, num_tasks, running)
            first = await _told(services, "running", 0.0, running)
            latencies = []
            begun = process.cpu_times()
            for _ in range(changes):
                for action, state in (("pause", "paused"), ("resume", "running")):
                    started = time.monotonic()
                    await client.call("POST", f"{path}/{action}", deadline_seconds=60)
                    latencies.append(sorted(at - started for at in await _told(services, state, started, running)))
            ended = process.cpu_times()
            pushes, cpu = await _quiet(services, process, quiet_seconds)
        finally:
            for task in running:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*running, return_exceptions=True)
        memory = process.memory_info().rss
    assert len(first) == num_services
    flat = sorted(seconds for each in latencies for seconds in each)
    reach = max(quantile(each, 0.99) for each in latencies)
    return {
        "services": num_services,
        "tasks_outstanding": outstanding,
        "lost_leases": sum(each.lost_leases for each in services),
        "all_joined_seconds": round(joined, 2),
        "change_p50_seconds": round(quantile(flat, 0.5), 4),
        "change_p99_seconds": round(quantile(flat, 0.99), 4),
        "worst_change_reaches_99_percent_seconds": round(reach, 4),
        "change_cpu_milliseconds_per_service": round(
            1e3 * (ended.user + ended.system - begun.user - begun.system) / len(flat), 3
        ),
        "push_p50_seconds": round(quantile(pushes, 0.5), 4),
        "push_p99_seconds": round(quantile(pushes, 0.99), 4),
        "cpu_percent": round(cpu, 1),
        "cpu_percent_per_service": round(cpu / num_services, 3),
        "memory_megabytes": round(memory / 1e6, 1),
        "memory_kilobytes_per_service": round((memory - memory_before) / 1e3 / num_services, 1),
    }


async def _until_outstanding(
    client: GatewayClient, path: str, num_tasks: int, running: list[asyncio.Task[None]]
) -> int:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        ledger = await client.call("GET", f"{path}/ledger", deadline_seconds=60)
        if ledger["train"]["outstanding"] >= num_tasks:
            return int(ledger["train"]["outstanding"])
        _check(running, end, f"tasks to be issued, {ledger['train']['outstanding']} are")
        await asyncio.sleep(0.2)


async def _told(services: list[Simulated], state: str, after: float, running: list[asyncio.Task[None]]) -> list[float]:
    """Wait until every service was told, and give the times."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        times = [each.told_at.get(state, -1.0) for each in services]
        if min(times) > after:
            return times
        _check(running, end, f"services to be told {state}")
        await asyncio.sleep(0.05)


def _check(running: list[asyncio.Task[None]], end: float, what: str) -> None:
    for task in running:
        if task.done():
            task.result()
    if time.monotonic() > end:
        raise SystemExit(f"waited {PATIENCE_SECONDS:g} s for {what}")


async def _quiet(services: list[Simulated], process: psutil.Process, quiet_seconds: float) -> tuple[list[float], float]:
    """Let the services keep their rhythm for a time; give the pushes' durations and the gateway's CPU."""
    for each in services:
        each.push_seconds.clear()
    before, started = process.cpu_times(), time.monotonic()
    await asyncio.sleep(quiet_seconds)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any(each.push_seconds for each in services):  # noqa: ASYNC110 (a short time on a slow machine)
            await asyncio.sleep(0.05)
    after, seconds = process.cpu_times(), time.monotonic() - started
    cpu = 100 * (after.user + after.system - before.user - before.system) / seconds
    return sorted(seconds for each in services for seconds in each.push_seconds), cpu


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def main() -> None:
    """Measure every number of services and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10 and 100 services, one change each way")
    parser.add_argument("--services", help="numbers of services, separated by commas (10,100,1000)")
    parser.add_argument("--tasks", type=int, default=TASKS, help="tasks that are outstanding meanwhile")
    parser.add_argument("--seconds", type=float, default=PUSH_SECONDS, help="time without a change")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    numbers = [
        int(each) for each in (arguments.services or ("10,100" if arguments.quick else "10,100,1000")).split(",")
    ]
    results = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="scale-") as directory:
            options = {"num_tasks": arguments.tasks, "quiet_seconds": arguments.seconds}
            results.append(asyncio.run(measure(number, Path(directory), 1 if arguments.quick else 3, **options)))
        print(json.dumps(results[-1]), flush=True)
    growth = {
        name: round(results[-1][name] / results[0][name], 2)
        for name in ("change_p99_seconds", "push_p99_seconds", "cpu_percent", "memory_megabytes")
    }
    reached = results[-1]["worst_change_reaches_99_percent_seconds"] <= BAR_SECONDS
    print(f"from {numbers[0]} to {numbers[-1]} services: {json.dumps(growth)}; within {BAR_SECONDS:g} s: {reached}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"results": results, "growth": growth, "reached": reached}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
