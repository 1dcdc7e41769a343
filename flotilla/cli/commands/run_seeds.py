"""``flotilla run SPEC --seeds N``: the same experiment with several seeds, on one fleet, and what is more than noise.

The experiments share the fleet by its quotas: with one trainer they run one after another, with as many trainers and
reward services as seeds all at once.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flotilla.cli.commands.report import Comparison
from flotilla.cli.continuing import go_on, overrides_of
from flotilla.cli.fleet import LocalFleet
from flotilla.cli.following import REFRESH_SECONDS, follow, has_ended, is_paused
from flotilla.cli.gateway import READ_SECONDS, START_SECONDS
from flotilla.cli.output import new_console, short_path
from flotilla.cli.own_fleet import fleet_options, prepare, until_settled
from flotilla.cli.progress import Progress, duration
from flotilla.cli.run_directory import RunDirectory
from flotilla.client.asynchronous import AsyncClient
from flotilla.launch_file import LaunchFile, read_launch_file
from flotilla.shared.errors import FlotillaError
from flotilla.shared.locations.allowed import grant_code
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView

SUMMARY = "seeds.json"
PAUSED_SECONDS = 600.0
"""How long paused seeds are waited for once nothing else continues."""


def launches_of(arguments: argparse.Namespace, name: str, seed: int) -> list[LaunchFile]:
    """Read the launch file once for each seed, from ``seed`` on; each has a name of its own."""
    seeds = range(seed, seed + arguments.seeds)
    named = [[f"seed={each}", f"name={json.dumps(f'{name}-seed-{each}')}"] for each in seeds]
    return [read_launch_file(Path(arguments.spec), [*overrides_of(arguments), *own], os.environ) for own in named]


async def run_seeds(arguments: argparse.Namespace, launch: LaunchFile, directory: RunDirectory) -> int:
    """Run all seeds to their end, and show them side by side; return the exit code.

    Args:
        launch: the file, as it is without ``--seeds``.
        directory: taken.
    """
    console, started = new_console(), time.monotonic()
    launches = launches_of(arguments, launch.spec.name, launch.spec.seed)
    options = await fleet_options(arguments, launch, directory)
    makes = not (arguments.go_on and directory.holds_run)
    for each in launches:
        await prepare(each, console, started, makes=makes)
    async with contextlib.AsyncExitStack() as held:
        fleet = LocalFleet(options, lambda line: console.print(line, markup=False))
        await held.enter_async_context(fleet)
        console.print(f"gateway    {fleet.gateway_url}   (logs in {short_path(options.data / 'logs')})")
        client = AsyncClient(fleet.gateway_url, fleet.info.token, deadline_seconds=READ_SECONDS)
        await held.enter_async_context(client)
        runs = [Progress(view) for view in await begun(client, launches, directory, options.data, arguments)]
        for run in runs:
            console.print(f"seed       {run.view.name} ({run.view.id})", markup=False)
        paused = await follow_all(runs, client, fleet, plain=arguments.plain)
        if paused:
            names = ", ".join(run.view.name for run in paused)
            console.print(
                f"{names}: paused, or waiting for what paused ones hold, for {duration(PAUSED_SECONDS)}; this command "
                "ends. Run it again with --continue, and resume them then",
                markup=False,
            )
        return report(runs, directory.path, time.monotonic() - started)


async def follow_all(
    runs: Sequence[Progress], client: AsyncClient, fleet: LocalFleet, *, plain: bool
) -> list[Progress]:
    """Follow each run until it ends, those that are paused last.

    A paused run keeps its trainer, which the others may wait for, and only a ``resume`` ends the pause: once
    nothing but paused runs and such that wait for services is left, it is waited for ``PAUSED_SECONDS``.

    Returns:
        Those that have not ended.

    Raises:
        WorkerDied: a process of the fleet failed for good.
        Unavailable: the gateway stayed away.
    """
    console, left, told = new_console(), list(runs), set[str]()
    standing = Standstill()
    while left:
        for each in left:
            await read(each, client)
            if is_paused(each.view) and each.view.id not in told:
                told.add(each.view.id)
                console.print(
                    f"paused     {each.view.name}: `flotilla resume {each.view.id}` lets it go on, `flotilla stop "
                    f"{each.view.id}` ends it; the other seeds go on meanwhile as far as they have services",
                    markup=False,
                )
        some_pause = any(is_paused(each.view) for each in left)
        # Runs with services first: one that waits for them may wait for another that was resumed.
        going = sorted((each for each in left if not is_paused(each.view)), key=lambda each: not each.view.services)
        is_still = some_pause and (not going or waits_for_services(going[0].view))
        if standing.is_over(is_still):
            return left
        if is_still:
            fleet.check()
            await asyncio.sleep(REFRESH_SECONDS)
            continue
        run = going[0]

        def leaves(view: ExperimentView, some_pause: bool = some_pause) -> bool:
            return has_ended(view) or is_paused(view) or (some_pause and waits_for_services(view))

        await follow(run, client, fleet, plain=plain, leaves=leaves)
        if has_ended(run.view):
            await until_settled(run, client)
            left.remove(run)
    return []


async def read(run: Progress, client: AsyncClient) -> None:
    """Read on; a gateway that is unavailable for a while is asked again."""
    try:
        await run.refresh(client)
    except FlotillaError as error:
        if not error.retryable:
            raise


class Standstill:
    """How long nothing has gone on."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_over(self, is_still: bool) -> bool:
        """Whether nothing has gone on for ``PAUSED_SECONDS``."""
        now = time.monotonic()
        self._since = None if not is_still else now if self._since is None else self._since
        return self._since is not None and now - self._since >= PAUSED_SECONDS


def waits_for_services(view: ExperimentView) -> bool:
    """Whether it has begun and nothing works for it."""
    return view.state is ExperimentState.STARTING and not view.services


async def begun(
    client: AsyncClient,
    launches: Sequence[LaunchFile],
    directory: RunDirectory,
    data: Path,
    arguments: argparse.Namespace,
) -> list[ExperimentView]:
    """Create all experiments, or let those continue that an interrupted command has created."""
    known = {each.name: each.id for each in await client.experiments()} if arguments.go_on else {}
    views: list[ExperimentView] = []
    for launch in launches:
        grant_code(data, launch.document)
        view = None
        if (experiment_id := known.get(launch.spec.name)) is not None:
            view = await go_on(client, experiment_id, launch.spec, new_console().print)
        if view is None:
            view = await client.with_deadline(START_SECONDS).create(launch.document, start=True)
        if not views:
            directory.record(view.id)
        views.append(view)
    return views


def report(runs: Sequence[Progress], path: Path, wall_seconds: float) -> int:
    """Show the runs side by side, and keep the figures; return the exit code."""
    comparison = Comparison.of(runs)
    comparison.show()
    written = path / SUMMARY
    temporary = written.with_suffix(".tmp")
    temporary.write_text(json.dumps(comparison.document(), indent=2) + "\n", encoding="utf-8")
    temporary.replace(written)
    console = new_console()
    console.print(f"seeds      {short_path(written)}", markup=False)
    console.print(f"this command took {duration(wall_seconds)}")
    return 0 if all(run.view.state is ExperimentState.COMPLETED for run in runs) else 1
