"""``flotilla run SPEC --seeds N``: the same experiment with several seeds, on one fleet, and what is more than noise.

The experiments share the fleet by its quotas: with one trainer they run one after another, with as many trainers and
reward services as seeds all at once.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flotilla.cli.commands.report import Comparison
from flotilla.cli.continuing import go_on, overrides_of
from flotilla.cli.fleet import LocalFleet
from flotilla.cli.following import follow
from flotilla.cli.gateway import READ_SECONDS, START_SECONDS
from flotilla.cli.output import new_console, short_path
from flotilla.cli.own_fleet import fleet_options, prepare, until_settled
from flotilla.cli.progress import Progress, duration
from flotilla.cli.run_directory import RunDirectory
from flotilla.client.asynchronous import AsyncClient
from flotilla.launch_file import LaunchFile, read_launch_file
from flotilla.shared.locations.allowed import grant_code
from flotilla.shared.schemas.experiment import ExperimentState, ExperimentView

SUMMARY = "seeds.json"


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
            await follow(run, client, fleet, plain=arguments.plain)
            await until_settled(run, client)
        return report(runs, directory.path, time.monotonic() - started)


async def begun(
    client: AsyncClient,
    launches: Sequence[LaunchFile],
    directory: RunDirectory,
    data: Path,
    arguments: argparse.Namespace,
) -> list[ExperimentView]:
    """Create all experiments, or let those go on that an interrupted command has created."""
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
