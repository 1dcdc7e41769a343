"""Agents that other frameworks' code makes: ``python -m flotilla.agents openrlhf | verifiers | nemo-gym | harbor``."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from flotilla.agents import box
from flotilla.agents.episodes import Play, play_all
from flotilla.agents.harbor import HarborAgent, Harness, read_tasks, task_rows
from flotilla.agents.harbor_tasks import HarborTask
from flotilla.agents.nemo_gym import NemoGymAgent, gym_client, rows_of_gym
from flotilla.agents.openrlhf import OpenRlhfAgent, load_agent
from flotilla.agents.rows import write_rows
from flotilla.agents.tasksets import has_tasksets, load_taskset, rows_of_taskset, serving
from flotilla.agents.verifiers import VerifiersAgent, load_environment, new_client, rows_of
from flotilla.shared.environment.secret_variables import forget_secrets
from flotilla.shared.environment.settings import IPNetwork, networks_from
from flotilla.shared.errors import FlotillaError, InvalidRequest, InvalidSpec
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.task import Lane
from flotilla.shared.telemetry.logging import configure_logging

WHAT: Mapping[str, str] = {
    "openrlhf": "AgentInstance of a file (OpenRLHF's agent_func_path)",
    "verifiers": "environment or taskset of the verifiers package: the id of an installed one, or a file",
    "nemo-gym": "NeMo Gym resources server, as http://HOST:PORT (to write rows: a file of its data)",
    "harbor": "Harbor task folder, or a folder of them",
}
"""What each kind plays with."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla.agents", description="Drive the episodes of an experiment."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in WHAT.items():
        playing = kinds.add_parser(kind, help=f"play with the {what}")
        playing.add_argument("source", metavar="SOURCE", help=what)
        playing.add_argument("experiment", help="id")
        playing.add_argument("--gateway", default=os.environ.get("FLOTILLA_GATEWAY_URL", "http://127.0.0.1:8470"))
        playing.add_argument("--parallel", type=int, default=16, help="episodes at a time")
        asked = [playing]
        if kind != "openrlhf":
            rows = kinds.add_parser(f"{kind}-rows", help="write the rows for the experiment's data")
            rows.add_argument("source", metavar="SOURCE", help=what)
            rows.add_argument("output", type=Path, help="JSON lines")
            asked.append(rows)
        _add_options(kind, *asked)
    return parser


def _add_options(kind: str, playing: argparse.ArgumentParser, *rows: argparse.ArgumentParser) -> None:
    if kind == "verifiers":
        for each in (playing, *rows):
            each.add_argument("--options", type=json.loads, default={}, help="of load_environment, or [env], as JSON")
        rows[0].add_argument("--held-out", action="store_true", help="those that it evaluates on (verifiers 0.1)")
        rows[0].add_argument("--limit", type=int, help="how many (tasksets)")
    elif kind == "nemo-gym":
        playing.add_argument("--max-steps", type=int, help="answers of one episode at most")
        what = "those that are not public and that the server may be in, as 10.3.0.0/16,..., or none (default: any)"
        playing.add_argument("--networks", type=_networks, help=what)
    elif kind == "harbor":
        for each in (playing, *rows):
            each.add_argument("--skip-run", action="store_true", help="this machine has what RUN lines install")
            what = "environment variable that tasks may read, as ${NAME}"
            each.add_argument("--secret", metavar="NAME", action="append", default=[], help=what)
        playing.add_argument("--harness", required=True, help="the command of a shell that plays a task")
        playing.add_argument("--seconds", type=float, default=600.0, help="of the harness, where a task sets none")
        playing.add_argument("--readable", type=Path, action="append", default=[], help="path that the harness needs")
        playing.add_argument("--closed", action="store_true", help="no network for any task but to the policy")
        playing.add_argument("--keep", type=Path, help="folder in which each episode's box is left")


def _networks(text: str) -> tuple[IPNetwork, ...]:
    try:
        return networks_from({"--networks": text}, "--networks", ())
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.detail) from error


async def _run(arguments: argparse.Namespace, token: str) -> int:
    # A signal lets it clean up, as Ctrl-C does.
    playing = asyncio.current_task()
    assert playing is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    async with AsyncExitStack() as stack:
        play = await _play_of(arguments, stack)
        return await play_all(arguments.gateway, arguments.experiment, token, play, parallel=arguments.parallel)


async def _play_of(arguments: argparse.Namespace, stack: AsyncExitStack) -> Play:
    """Make what plays an episode; what it needs is open until the stack ends.

    Raises:
        InvalidSpec: it cannot be made.
    """
    source = arguments.source
    match arguments.kind:
        case "openrlhf":
            limits = httpx.Limits(max_connections=arguments.parallel)
            client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, verify=tls_context()))
            return OpenRlhfAgent(load_agent(Path(source)), client)
        case "nemo-gym":
            connections = await stack.enter_async_context(gym_client(arguments.parallel, source, arguments.networks))
            return NemoGymAgent(source, connections, arguments.max_steps)
        case "harbor":
            if (reason := box.why_not()) is not None:
                raise InvalidSpec(f"there are no boxes here: {reason}")
            readable = [path.resolve() for path in arguments.readable]
            harness = Harness(
                arguments.harness,
                arguments.seconds,
                readable,
                keep=arguments.keep,
                is_closed=arguments.closed,
                folder=stack.enter_context(box.folder_of_boxes()),
            )
            return HarborAgent(_tasks(arguments), harness)
    if has_tasksets():
        return await stack.enter_async_context(serving(load_taskset(source, arguments.options)))
    environment = load_environment(source, arguments.options)
    return VerifiersAgent(environment, await stack.enter_async_context(new_client(arguments.gateway)))


def _tasks(arguments: argparse.Namespace) -> dict[str, HarborTask]:
    return read_tasks(Path(arguments.source), skip_run=arguments.skip_run, readable=arguments.secret)


def _write(arguments: argparse.Namespace) -> int:
    """Write rows; return how many."""
    source, output = arguments.source, arguments.output
    if arguments.kind == "nemo-gym-rows":
        return write_rows(rows_of_gym(Path(source)), output)
    if arguments.kind == "harbor-rows":
        return write_rows(task_rows(_tasks(arguments)), output)
    if has_tasksets():
        return write_rows(rows_of_taskset(load_taskset(source, arguments.options), arguments.limit), output)
    lane = Lane.EVALUATION if arguments.held_out else Lane.TRAIN
    return write_rows(rows_of(load_environment(source, arguments.options), lane), output)


def main() -> int:
    """Play until the experiment has ended; the token is FLOTILLA_TOKEN."""
    configure_logging("agents", "WARNING", "plain")
    arguments = _parser().parse_args()
    token = os.environ.get("FLOTILLA_TOKEN")
    # Agents, environments and what they start are others' code: each episode has a key of its own.
    forget_secrets()
    try:
        if "output" in arguments:
            print(_write(arguments), "rows")
            return 0
        if not token:
            print("FLOTILLA_TOKEN is not set: the fleet's, or a token of the scope agent", file=sys.stderr)
            return 2
        print(asyncio.run(_run(arguments, token)), "episodes")
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except FlotillaError as error:
        print(error.detail, file=sys.stderr)
        return 2
    except ExceptionGroup as errors:
        # Episodes are played side by side: what ends one ends all, and is said once.
        ours, others = errors.split(FlotillaError)
        if ours is None or others is not None:
            raise
        print(first_of(ours).detail, file=sys.stderr)
        return 2
    return 0


def first_of(errors: ExceptionGroup[FlotillaError]) -> FlotillaError:
    """Find the first error of a group."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first


if __name__ == "__main__":
    sys.exit(main())
