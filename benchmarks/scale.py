"""One gateway and many services: latency of the long poll, CPU and memory per service, and how each grows.

The gateway is the real process on a real server, with 10,000 tasks of one experiment outstanding. The services are
simulated by asyncio clients of this process over loopback (``benchmarks/simulated_services.py``). Measured for each
number of services, every time from the moment that a request is sent:

- *change*: until each service has read its new desired state, of a pause or a resume that is sent while the gateway is
  at rest, each acknowledgement of the one before taken; *answer*: until who asked for it is answered;
- *change in a row*: the same of changes that are sent as soon as the one before is answered and read by every service,
  while the gateway still takes its acknowledgements; and how long each of them takes on the average;
- *joining*: how long it takes all services to register at once, and the gateway's CPU for it;
- *push*: how long an observation without waiting takes, at the services' ordinary rhythm, and within half a second of a
  change;
- *publication*: CPU of the gateway from the announcement of a version until every rollout was told to serve it and one
  second of rest, and how long it takes; each rollout joins, receives and serves as soon as it is told;
- *start*: how long a gateway takes to start where an experiment has published 4,000 versions, and one;
- CPU of the gateway in per cent of one core while nothing changes, and its memory.

In the end each line that a fleet shall keep is said with what was measured, and whether it is kept: a publication costs
the gateway at most ``PUBLICATION_BAR_SECONDS`` of CPU to ``BAR_MEMBERS``, and per member no more at more members; a
start after 4,000 publications takes less than ``START_BAR_SECONDS``.

``python -m benchmarks.scale [--quick] [--services 10,100,202,1000] [--tasks 10000] [--seconds 10] [--json FILE]``
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.simulated_services import PUSH_SECONDS, TOKEN, Push, SimulatedService
from flotilla.cli.redis_server import LocalRedis
from flotilla.services.gateway.store.records import ExperimentRecord, PublicationRecord
from flotilla.services.gateway.store.sql import SqlStore
from flotilla.services.gateway.store.writes import PutRecord
from flotilla.shared.children.processes import python_module
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.publication import Manifest, PublicationRequest, TensorSpec
from flotilla.shared.schemas.service import ServiceKind
from tests.fleet import make_experiment, until

TASKS = 10_000
STATES = {"pause": "paused", "resume": "running"}
BAR_SECONDS = 1.0
REST_SECONDS = 1.0
"""Longer than a gateway works on the acknowledgements of a change."""
BESIDE_SECONDS = 0.5
PUBLICATIONS = 3
TENSORS = 30
PUBLISHED = 4000
PUBLICATION_BAR_SECONDS = 1.0
"""Of the gateway's CPU for a publication to 200 rollouts."""
BAR_MEMBERS = 200
START_BAR_SECONDS = 2.0
LINEAR_FROM = 100
"""Below, what a publication costs whoever it goes to outweighs what it costs for each."""
SHARE_OF_NOISE = 0.25
"""What one number of services may cost more per member than a smaller one: of 100 it is 0.1 s, told in steps of 0.01 s,
and differs by as much from run to run."""
PATIENCE_SECONDS = 300.0


@asynccontextmanager
async def gateway(directory: Path, data: Path | None = None) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run a gateway with a server of its own, on the data of an earlier one or on none."""
    with LocalRedis(directory / "redis") as server:
        environment = {
            **os.environ,
            "FLOTILLA_TOKEN": TOKEN,
            "FLOTILLA_REDIS_URL": server.url,
            "FLOTILLA_DATA": str(data or directory / "data"),
            "FLOTILLA_CODE_FOLDERS": str(directory),
            "FLOTILLA_PORT": "0",
            "FLOTILLA_LOG_LEVEL": "WARNING",
        }
        log = directory / "gateway.log"
        with log.open("wb") as errors, (directory / "address").open("wb") as address:
            process = subprocess.Popen(  # noqa: ASYNC220
                python_module("flotilla.services.gateway"), env=environment, stdout=address, stderr=errors
            )
        try:
            await asyncio.to_thread(
                until,
                lambda: (directory / "address").read_text().endswith("\n") or process.poll() is not None,
                PATIENCE_SECONDS,
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


@dataclass(frozen=True, slots=True)
class Change:
    """One change of all services; times in seconds.

    Attributes:
        sent_at: by the monotonic clock.
        answer: until who asked for it was answered.
        told: until each service had read it, in ascending order.
    """

    sent_at: float
    answer: float
    told: list[float]


class Fleet:
    """Many simulated services and the experiment that they work for."""

    def __init__(self, client: GatewayClient, services: list[SimulatedService]) -> None:
        self._client = client
        self.services = services
        self._running: list[asyncio.Task[None]] = []
        self._path = ""

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[float]:
        """Let the services work while the block runs; give the seconds that it took all to join."""
        self._running = [asyncio.create_task(each.run()) for each in self.services]
        try:
            joining = time.monotonic()
            await self._until(lambda: all(each.id for each in self.services), "services to register")
            yield time.monotonic() - joining
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def start(self, spec: dict[str, Any], num_tasks: int) -> int:
        """Start an experiment; return how many tasks are outstanding once they are as many as wanted."""
        view = await self._client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
        self._path = f"/v1/experiments/{view['id']}"
        await self._client.call("POST", f"{self._path}/start", deadline_seconds=60)
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            ledger = await self._client.call("GET", f"{self._path}/ledger", deadline_seconds=60)
            if ledger["train"]["outstanding"] >= num_tasks:
                break
            self._check(end, f"tasks to be issued, {ledger['train']['outstanding']} are")
            await asyncio.sleep(0.2)
        await self._told("running", 0.0)
        return int(ledger["train"]["outstanding"])

    async def change(self, action: str) -> Change:
        """Pause or resume; return once that is answered and every service has read it."""
        sent_at = time.monotonic()
        await self._client.call("POST", f"{self._path}/{action}", deadline_seconds=60)
        answer = time.monotonic() - sent_at
        return Change(sent_at, answer, [at - sent_at for at in await self._told(STATES[action], sent_at)])

    async def changes(self, num: int, rest_seconds: float) -> list[Change]:
        """Pause and resume so often, with a rest before each change."""
        made = []
        for action in list(STATES) * num:
            await asyncio.sleep(rest_seconds)
            made.append(await self.change(action))
        return made

    def pushes(self) -> list[Push]:
        """List what was pushed so far."""
        return [push for each in self.services for push in each.pushes]

    async def quiet(self, seconds: float, process: psutil.Process) -> tuple[list[Push], float]:
        """Let the services keep their rhythm for a time; give their pushes, and the gateway's CPU in per cent."""
        before, started = process.cpu_times(), time.monotonic()
        await asyncio.sleep(seconds)
        await self._until(lambda: any(push.sent_at > started for push in self.pushes()), "a push")
        after, ended = process.cpu_times(), time.monotonic()
        cpu = 100 * (after.user + after.system - before.user - before.system) / (ended - started)
        return [push for push in self.pushes() if push.sent_at > started], cpu

    async def publish(self, version: int, process: psutil.Process) -> tuple[float, float]:
        """Publish a version to every rollout; give the gateway's CPU and what it took, in seconds."""
        path = f"{self._path}/publications"
        rollouts = [each for each in self.services if each.kind is ServiceKind.ROLLOUT]
        before, started = process.cpu_times(), time.monotonic()
        request = PublicationRequest(manifest=manifest_of(version), step=version)
        found = await self._client.call("POST", path, body=request, deadline_seconds=60)
        place = {"host": "127.0.0.1", "port": 1, "epoch": found["epoch"], "world_size": len(rollouts) + 1}
        if found["rendezvous"] is None:
            await self._client.call("PUT", f"{path}/{version}/rendezvous", body=place, deadline_seconds=60)
        end = time.monotonic() + PATIENCE_SECONDS
        for phase in ("preparing", "transferring"):
            while found["phase"] in {"preparing", phase}:
                self._check(end, f"version {version} to leave {found['phase']}")
                wait = {"wait": 10, "phase": found["phase"]}
                found = await self._client.call("GET", f"{path}/{version}", params=wait, deadline_seconds=60)
        if found["phase"] != "committed" or len(found["members"]) != len(rollouts):
            raise SystemExit(
                f"version {version} is {found['phase']} with {len(found['members'])} members: {found['reason']}"
            )
        await self._until(lambda: all(each.version == version for each in rollouts), f"rollouts to serve {version}")
        took = time.monotonic() - started
        await asyncio.sleep(REST_SECONDS)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system, took

    async def _told(self, state: str, after: float) -> list[float]:
        await self._until(
            lambda: all(each.told_at.get(state, -1.0) > after for each in self.services), f"services to be told {state}"
        )
        return sorted(each.told_at[state] for each in self.services)

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            self._check(end, what)
            await asyncio.sleep(0.005)

    def _check(self, end: float, what: str) -> None:
        for task in self._running:
            if task.done():
                task.result()
        if time.monotonic() > end:
            raise SystemExit(f"waited {PATIENCE_SECONDS:g} s for {what}")


def manifest_of(version: int) -> Manifest:
    """Make the manifest of a small model's image."""
    tensors = [
        TensorSpec(name=f"model.layers.{n}.weight", shape=(8, 8), dtype="F32", start=256 * n, end=256 * (n + 1))
        for n in range(TENSORS)
    ]
    checksum = f"{version:016x}"
    return Manifest(
        version=version, image_bytes=256 * TENSORS, slice_bytes=4096, checksum=checksum, tensors=tuple(tensors)
    )


async def start_after(num_publications: int, directory: Path) -> float:
    """How long a gateway takes to start on a database with so many publications, in seconds."""
    await asyncio.to_thread(directory.mkdir)
    experiment_id = "published-1"
    fields = {"experiment_id": experiment_id, "service_id": "trainer-1", "members": [], "rendezvous": None}
    store = await SqlStore.open(f"sqlite:///{directory / 'gateway.sqlite'}")
    record = ExperimentRecord(
        id=experiment_id,
        name="published",
        state=ExperimentState.STOPPED,
        revision=1,
        spec=await asyncio.to_thread(spec_of, directory, 100),
        directory=str(directory / experiment_id),
        created_at=1.0,
        updated_at=1.0,
        policy_version=num_publications,
    )
    await store.apply([PutRecord(record)])
    versions = range(1, num_publications + 1)
    for first in versions[::500]:
        rows = [
            PublicationRecord(
                **fields,
                version=each,
                step=each,
                epoch=each,
                phase="committed",
                manifest=manifest_of(each).model_dump(mode="json"),
                reason=None,
                announced_at=float(each),
                ended_at=each + 0.5,
            )
            for each in versions[first - 1 : first + 499]
        ]
        await store.apply([PutRecord(each) for each in rows])
    await store.close()
    began = time.monotonic()
    async with gateway(directory.parent, directory) as (address, _), GatewayClient(address, TOKEN) as client:
        await client.call("GET", "/readyz", deadline_seconds=PATIENCE_SECONDS)
        took = time.monotonic() - began
        view = await client.call("GET", f"/v1/experiments/{experiment_id}")
        assert view["policy_version"] == num_publications, view
    return took


async def measure(
    num_services: int, directory: Path, changes: int, *, num_tasks: int = TASKS, quiet_seconds: float = PUSH_SECONDS
) -> dict[str, Any]:
    """Measure one number of services, on a gateway of its own."""
    async with gateway(directory) as (address, process), GatewayClient(address, TOKEN) as client:
        memory_before = process.memory_info().rss
        kinds = [ServiceKind.TRAINER, ServiceKind.REWARD] + [ServiceKind.ROLLOUT] * (num_services - 2)
        fleet = Fleet(client, [SimulatedService(address, number, kind) for number, kind in enumerate(kinds)])
        spec = await asyncio.to_thread(spec_of, directory, num_tasks)
        begun = process.cpu_times()
        async with fleet.at_work() as joined:
            ended = process.cpu_times()
            joining_cpu = ended.user + ended.system - begun.user - begun.system
            outstanding = await fleet.start(spec, num_tasks)
            settled = await fleet.changes(changes, REST_SECONDS)
            await asyncio.sleep(REST_SECONDS)
            begun, started = process.cpu_times(), time.monotonic()
            in_a_row = await fleet.changes(changes, 0.0)
            row_seconds = time.monotonic() - started
            await asyncio.sleep(REST_SECONDS)
            ended = process.cpu_times()
            published = [await fleet.publish(version, process) for version in range(1, PUBLICATIONS + 1)]
            pushes, cpu = await fleet.quiet(quiet_seconds, process)
        memory = process.memory_info().rss
    beside = [push for push in fleet.pushes() if any(is_beside(push, change) for change in settled + in_a_row)]
    change_cpu = 1e3 * (ended.user + ended.system - begun.user - begun.system) / len(in_a_row) / num_services
    return {
        "services": num_services,
        "tasks_outstanding": outstanding,
        "lost_leases": sum(each.lost_leases for each in fleet.services),
        "repeated_calls": sum(each.repeated_calls for each in fleet.services),
        "all_joined_seconds": round(joined, 2),
        "joining_cpu_seconds": round(joining_cpu, 2),
        **summary("change", [seconds for change in settled for seconds in change.told]),
        "worst_change_reaches_99_percent_seconds": round(max(quantile(change.told, 0.99) for change in settled), 4),
        **summary("answer", [change.answer for change in settled]),
        **summary("change_in_a_row", [seconds for change in in_a_row for seconds in change.told]),
        **summary("answer_in_a_row", [change.answer for change in in_a_row]),
        "change_in_a_row_mean_seconds": round(row_seconds / len(in_a_row), 4),
        "change_cpu_milliseconds_per_service": round(change_cpu, 3),
        "publication_cpu_seconds": round(min(cpu for cpu, _ in published), 3),
        "publication_seconds": round(min(seconds for _, seconds in published), 3),
        **summary("push", [push.seconds for push in pushes]),
        **summary("push_beside_a_change", [push.seconds for push in beside]),
        "cpu_percent": round(cpu, 1),
        "cpu_percent_per_service": round(cpu / num_services, 3),
        "memory_megabytes": round(memory / 1e6, 1),
        "memory_kilobytes_per_service": round((memory - memory_before) / 1e3 / num_services, 1),
    }


def is_beside(push: Push, change: Change) -> bool:
    """Whether a push was sent soon after a change was."""
    return 0 <= push.sent_at - change.sent_at <= BESIDE_SECONDS


def summary(name: str, values: list[float]) -> dict[str, float | None]:
    """Give median and 99th percentile under the names of the results; None where there is nothing."""
    ordered = sorted(values)
    return {
        f"{name}_p{share:g}_seconds": round(quantile(ordered, share / 100), 4) if ordered else None
        for share in (50, 99)
    }


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


@dataclass(frozen=True, slots=True)
class Line:
    """Something that a fleet shall keep, as measured; None: it was not measured."""

    what: str
    found: str
    is_kept: bool | None


def lines_of(results: list[dict[str, Any]], starts: dict[int, float]) -> list[Line]:
    """Judge what was measured.

    Args:
        results: of ``measure``, by number of services in ascending order.
        starts: seconds of a start, by number of publications.
    """
    cpu = {each["services"]: each["publication_cpu_seconds"] for each in results}
    enough = {number: seconds for number, seconds in cpu.items() if number - 2 >= BAR_MEMBERS}
    # Of more members where that number was not measured: they cost more.
    at_bar = min(enough) if enough else None
    lost = {each["services"]: each["lost_leases"] for each in results}
    per_member = {number: seconds / (number - 2) for number, seconds in cpu.items() if number >= LINEAR_FROM}
    told = [
        f"{1e3 * each:.2f} ms of {number - 2}" + (f", {lost[number]} leases lost" if lost[number] else "")
        for number, each in per_member.items()
    ]
    # Where leases ended a group was formed again, which no number of members costs.
    first, *others = [each for number, each in per_member.items() if not lost[number]] or [0.0]
    is_linear = all(each <= first * (1 + SHARE_OF_NOISE) for each in others) if others else None
    published, took = max(starts.items())
    return [
        Line(
            f"a publication to {BAR_MEMBERS} members takes at most {PUBLICATION_BAR_SECONDS:g} s of the gateway's CPU",
            "not measured" if at_bar is None else f"{cpu[at_bar]:g} s to {at_bar - 2}",
            _is_at_most(cpu, at_bar),
        ),
        Line(
            f"a publication costs no more per member where there are more, from {LINEAR_FROM} services on",
            "; ".join(told) or "not measured",
            None if is_linear and lost[max(lost)] else is_linear,
        ),
        Line(
            f"a start after {PUBLISHED} publications takes less than {START_BAR_SECONDS:g} s",
            f"{took:g} s after {published}, {starts[min(starts)]:g} s after {min(starts)}",
            took < START_BAR_SECONDS if published >= PUBLISHED else None,
        ),
    ]


def _is_at_most(cpu: dict[int, float], at: int | None) -> bool | None:
    if at is None or (cpu[at] > PUBLICATION_BAR_SECONDS and at - 2 > BAR_MEMBERS):
        return None
    return cpu[at] <= PUBLICATION_BAR_SECONDS


def main() -> None:
    """Measure every number of services and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10 and 100 services, one change each way")
    parser.add_argument("--services", help="numbers of services, separated by commas (10,100,202,1000)")
    parser.add_argument("--tasks", type=int, default=TASKS, help="tasks that are outstanding meanwhile")
    parser.add_argument("--seconds", type=float, default=PUSH_SECONDS, help="time without a change")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    numbers = [
        int(each) for each in (arguments.services or ("10,100" if arguments.quick else "10,100,202,1000")).split(",")
    ]
    began = time.monotonic()
    results = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="scale-") as directory:
            options = {"num_tasks": arguments.tasks, "quiet_seconds": arguments.seconds}
            results.append(asyncio.run(measure(number, Path(directory), 1 if arguments.quick else 3, **options)))
        print(json.dumps(results[-1]), flush=True)
    num_published, starts = PUBLISHED // 10 if arguments.quick else PUBLISHED, {}
    for number in (1, num_published):
        with tempfile.TemporaryDirectory(prefix="scale-") as directory:
            starts[number] = round(asyncio.run(start_after(number, Path(directory) / "data")), 2)
    names = ("change_p99_seconds", "push_p99_seconds", "publication_cpu_seconds", "cpu_percent", "memory_megabytes")
    # What was too little to measure has no growth.
    growth = {name: round(results[-1][name] / results[0][name], 2) if results[0][name] else None for name in names}
    lines = lines_of(results, starts)
    for line in lines:
        kept = {True: "kept", False: "NOT KEPT", None: "not measured"}[line.is_kept]
        print(f"{kept}: {line.what}: {line.found}")
    reached = results[-1]["worst_change_reaches_99_percent_seconds"] <= BAR_SECONDS
    print(f"from {numbers[0]} to {numbers[-1]} services: {json.dumps(growth)}; within {BAR_SECONDS:g} s: {reached}")
    print(f"all of it took {time.monotonic() - began:.0f} s")
    if arguments.json:
        written = {
            "results": results,
            "growth": growth,
            "reached": reached,
            "start_seconds": starts,
            "lines": [asdict(line) for line in lines],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
