"""Honest work beside hostile neighbours: what it loses, and whether any of it is graded wrongly.

    python -m tests.soak [--minutes 30] [--neighbours programs,clients] [--report docs/soak.md] [--json FILE]

A fleet trains a tiny model. Beside it, at a steady rate, graders have programs run by the fleet's sandbox whose right
grades are known, and ask a grader over HTTP. In every other window lanes fill the rest of the sandbox with the attack
programs of the tests, a grader answers what no grader should, and clients send to gateway and sandbox what no client
should. What is compared is neighbouring windows of one run, so whatever else the machine does weighs on both. All is on
the loopback interface, and what was started is ended. A grade that is not the sample's own is false; none is absence.
"""

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.client import GatewayClient
from tests.fleet import RunningFleet, make_experiment, running_fleet
from tests.soak.hostile import HostileProcess, Hostility
from tests.soak.http import serve
from tests.soak.load import Load, Targets, grader_answer
from tests.soak.report import Report, Window, line_of, losses_line, order_of, verdicts, write

START_SECONDS = 300.0
STOP_SECONDS = 300.0
SETTLE_SECONDS = 3.0
"""After a change of the load, before what is done is counted."""
LEFT_ALONE_SECONDS = 240.0
"""Until the sandbox runs no program of a neighbour that has gone: a bounded one takes its time."""
FIRST_STEPS = 300
"""Before the first window: a run that begins has more groups to train on, and is faster for half a minute."""
HOSTILE_PROGRAMS = 6
"""At a time: more than the sandbox runs of one caller."""
ENDLESS = 1_000_000
NEIGHBOURS = frozenset({"programs", "graders", "clients"})
ENDED = {"stopped", "failed", "completed"}


async def steps_made(client: GatewayClient, path: str) -> float:
    """Read how many steps the experiment has made.

    Raises:
        RuntimeError: it has ended.
    """
    view = await client.call("GET", path, deadline_seconds=120)
    if view["state"] in ENDED:
        raise RuntimeError(f"the training run ended: {view['state']}, {view.get('problem')}")
    return float(view["step"])


async def wait_for(client: GatewayClient, path: str, seconds: float, *, steps: int | None) -> None:
    """Wait until the experiment has made so many steps, or with None until it has stopped.

    Raises:
        TimeoutError: it does not.
        RuntimeError: it ended instead.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if steps is None:
            if (await client.call("GET", path, deadline_seconds=120))["state"] in ENDED:
                return
        elif await steps_made(client, path) >= steps:
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"waited {seconds:g} s for {'the end' if steps is None else f'{steps} steps'}")


async def measure(client: GatewayClient, path: str, load: Load, window: Window, seconds: float) -> None:
    """Count what is done in a window, under the load that it says, once what hostile neighbours began is over."""
    if not window.is_hostile:
        await load.left_alone(LEFT_ALONE_SECONDS)
    async with load.beside_neighbours(window):
        await asyncio.sleep(SETTLE_SECONDS)
        first, started = await steps_made(client, path), time.monotonic()
        load.window = window
        await asyncio.sleep(seconds)
        window.steps = await steps_made(client, path) - first
        window.seconds = time.monotonic() - started
        load.window = Window(window.is_hostile)


async def sandbox_of(client: GatewayClient) -> tuple[str, str]:
    """Find the fleet's sandbox and its isolation."""
    page = await client.call("GET", "/v1/services", params={"kind": "sandbox"}, deadline_seconds=60)
    url = page["items"][0]["address"]
    async with httpx.AsyncClient(trust_env=False) as plain:
        return url, (await plain.get(f"{url}/healthz", timeout=60)).json()["isolation"]


async def alternate(
    client: GatewayClient, path: str, load: Load, minutes: float, window_seconds: float, report: Report
) -> None:
    """Measure one window after the other until the time is over."""
    honest = asyncio.create_task(load.honest())
    try:
        started = time.monotonic()
        for is_hostile in order_of(ENDLESS):
            elapsed = time.monotonic() - started
            if elapsed >= minutes * 60 and len(report.windows) % 2 == 0:
                break
            window = Window(is_hostile)
            await measure(client, path, load, window, window_seconds)
            report.windows.append(window)
            print(f"{elapsed / 60:4.1f} min  {line_of(window, report)}", flush=True)
    finally:
        honest.cancel()
        await asyncio.gather(honest, return_exceptions=True)
        await load.close()


async def soak(
    fleet: RunningFleet, folder: Path, neighbours: frozenset[str], minutes: float, window_seconds: float, report: Report
) -> None:
    """Train, and alternate windows until the time is over; then stop the training and read its ledger."""
    spec = make_experiment(folder, optimisation={"steps": ENDLESS}, checkpoint={"every_steps": 200})
    grader = await serve(grader_answer)
    async with grader, fleet.client() as client:
        view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
        path = f"/v1/experiments/{view['id']}"
        await client.call("POST", f"{path}/start", deadline_seconds=60)
        await wait_for(client, path, START_SECONDS, steps=FIRST_STEPS)
        sandbox, report.level = await sandbox_of(client)
        url = f"http://127.0.0.1:{grader.sockets[0].getsockname()[1]}"
        programs = HOSTILE_PROGRAMS if "programs" in neighbours else 0
        hostility = Hostility(fleet.url, sandbox, fleet.token, programs, sends_requests="clients" in neighbours)
        async with HostileProcess.started(hostility) as process:
            load = Load(Targets(sandbox, fleet.token, url, process, asks_hostile="graders" in neighbours), report)
            await alternate(client, path, load, minutes, window_seconds, report)
        await client.call("POST", f"{path}/stop", deadline_seconds=60)
        await wait_for(client, path, STOP_SECONDS, steps=None)
        ledger = (await client.call("GET", f"{path}/ledger", deadline_seconds=60))["train"]
        report.ledger = {name: ledger[name] for name in ("issued", "trained", "balanced")}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _neighbours(text: str) -> frozenset[str]:
    named = frozenset(text.split(","))
    if not named <= NEIGHBOURS:
        raise argparse.ArgumentTypeError(f"a list of {', '.join(sorted(NEIGHBOURS))}, not {text}")
    return named


def main() -> int:
    """Run it; 1 if honest work lost a tenth, or anything was graded wrongly or miscounted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--window-seconds", type=float, default=60.0)
    parser.add_argument(
        "--neighbours", type=_neighbours, default=NEIGHBOURS, help="which of them join, to tell their parts"
    )
    parser.add_argument("--report", type=Path, help="page to write the run into, such as docs/soak.md")
    parser.add_argument("--json", type=Path, help="figures to write")
    arguments = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # retries are counted, not told one by one
    report = Report()
    with tempfile.TemporaryDirectory(prefix="flotilla-soak-") as name:
        folder = Path(name)
        with running_fleet(folder / "fleet", sandbox=True) as fleet:
            try:
                asyncio.run(
                    soak(fleet, folder, arguments.neighbours, arguments.minutes, arguments.window_seconds, report)
                )
            except (FlotillaError, RuntimeError, TimeoutError) as error:
                report.problem = f"{type(error).__name__}: {error}"
    command = f"python -m tests.soak --minutes {arguments.minutes:g}"
    machine = f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[2]:.0f} in the last 15 minutes"
    write(report, arguments.report, arguments.json, command, machine)
    print(f"level {report.level}: {losses_line(report)}; ledger {dict(report.ledger)}")
    print("\n".join(verdicts(report)))
    for each in (*report.false_grades[:5], *report.failures[:5], *report.rewarded[:5]):
        print(f"not as it should be: {each[:500]}")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends this by its pid ends the fleet with it
        signal.signal(number, _interrupt)
    sys.exit(main())
