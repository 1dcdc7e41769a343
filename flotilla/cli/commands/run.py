"""``flotilla run SPEC``: a fleet of its own, one experiment, the result, and nothing left behind."""

import argparse
import asyncio
import contextlib
import fcntl
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from flotilla.cli.fleet import FleetOptions, LocalFleet
from flotilla.cli.following import REFRESH_SECONDS, follow
from flotilla.cli.output import new_console
from flotilla.cli.plots import write_plot
from flotilla.cli.progress import Progress, duration
from flotilla.cli.reading import read_checkpoints
from flotilla.cli.right_and_wrong import read_last
from flotilla.cli.summary import show_summary, summarise, write_summary
from flotilla.launch_file import LaunchFile, fetch_model, read_launch_file, run_prepare
from shared.client import GatewayClient
from shared.errors import FlotillaError, Unavailable
from shared.schemas.experiment import ExperimentState, ExperimentView

SETTLE_SECONDS = 10.0
LOCK_FILE = "lock"


class RunDirectory:
    """``runs/<name>``, or ``runs/<name>-2`` while another run uses that; an earlier run's files are moved aside."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._lock: IO[str] | None = None
        self.path = root / name

    def take(self) -> Path:
        """Take a directory that no other run uses, empty but for its lock."""
        for number in range(1, 1000):
            path = self._root / (self._name if number == 1 else f"{self._name}-{number}")
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / LOCK_FILE).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            self._lock, self.path = lock, path
            self._move_earlier_aside()
            return path
        raise Unavailable(f"every directory from {self._root / self._name} to -999 is in use")

    def _move_earlier_aside(self) -> None:
        earlier = [entry for entry in self.path.iterdir() if entry.name != LOCK_FILE]
        if not earlier:
            return
        made = datetime.fromtimestamp(max(entry.stat().st_mtime for entry in earlier), tz=UTC)
        aside = self._root / "earlier" / f"{self.path.name}-{made:%Y%m%d-%H%M%S-%f}"
        aside.mkdir(parents=True)
        for entry in earlier:
            entry.rename(aside / entry.name)

    def release(self) -> None:
        """Let another run have it."""
        if self._lock is not None:
            self._lock.close()


async def run(arguments: argparse.Namespace) -> int:
    """Run one experiment from nothing to its summary."""
    console = new_console()
    overrides = list(arguments.set or [])
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    launch = read_launch_file(Path(arguments.spec), overrides, os.environ)
    started = time.monotonic()
    directory = RunDirectory(Path(arguments.runs), arguments.name or launch.spec.name)
    path = directory.take()
    console.print(f"run        {path}")
    try:
        await run_prepare(launch, lambda line: console.print(f"prepare    {line}", markup=False))
        # Before the fleet starts: all of it is on this machine, and finds the model in the cache.
        await fetch_model(launch.spec, lambda line: console.print(f"model      {line}", markup=False))
        resources = launch.spec.resources
        options = FleetOptions(
            data=path / "fleet",
            num_rollouts=arguments.rollouts or resources.rollouts.min,
            num_trainers=arguments.trainers or 1,
            num_rewards=arguments.rewards or resources.rewards.min,
            num_sandboxes=arguments.sandboxes or (resources.sandboxes.min if resources.sandboxes else 1),
            host="127.0.0.1",
            port=arguments.port,
            redis_url=arguments.redis_url,
            log_level=arguments.log_level,
        )
        console.print(f"prepared   after {duration(time.monotonic() - started)}; the fleet starts")
        async with LocalFleet(options, lambda line: console.print(line, markup=False)) as fleet:
            console.print(f"gateway    {fleet.gateway_url}   (logs in {options.data / 'logs'})")
            return await _train(fleet, launch, path, arguments, started)
    finally:
        directory.release()


async def _train(
    fleet: LocalFleet, launch: LaunchFile, path: Path, arguments: argparse.Namespace, started: float
) -> int:
    console = new_console()
    async with GatewayClient(fleet.gateway_url, fleet.info.token) as client:
        answer = await client.call("POST", "/v1/experiments", body=launch.document, deadline_seconds=30)
        view = ExperimentView.model_validate(answer)
        progress = Progress(view)
        try:
            await client.call("POST", f"/v1/experiments/{view.id}/start", deadline_seconds=30)
            await follow(progress, client, fleet, plain=arguments.plain)
        except asyncio.CancelledError:
            console.print("stopping")
            with contextlib.suppress(FlotillaError, TimeoutError):
                async with asyncio.timeout(5):
                    await client.call("POST", f"/v1/experiments/{view.id}/stop", deadline_seconds=5)
            raise
        await _until_settled(progress, client)
        checkpoints = await read_checkpoints(client, view)
        wall = time.monotonic() - started
        unwritten = ""
        plot = path / "plot.png"
        try:
            has_plot = write_plot(progress, plot)
        except OSError as error:
            has_plot, unwritten = False, f"{plot} could not be written: {error.strerror}"
        summary = summarise(
            progress,
            wall_seconds=wall,
            checkpoints=checkpoints,
            logs=path / "fleet" / "logs",
            plot=plot if has_plot else None,
            samples=await read_last(client, progress),
        )
        show_summary(console, summary)
        console.print(f"samples    flotilla show {path} --worst", markup=False)
        try:
            write_summary(summary, path / "summary.json")
        except OSError as error:
            unwritten = f"{path / 'summary.json'} could not be written: {error.strerror}"
        if unwritten:
            raise Unavailable(unwritten)
        return 0 if progress.view.state is ExperimentState.COMPLETED else 1


async def _until_settled(progress: Progress, client: GatewayClient) -> None:
    """Wait until what was left of an experiment that failed is accounted for, so that the ledger shown is its last."""
    end = time.monotonic() + SETTLE_SECONDS
    while progress.ledger.get("outstanding") and time.monotonic() < end:
        await asyncio.sleep(REFRESH_SECONDS)
        await progress.refresh(client)
