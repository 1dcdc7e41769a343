"""Agents that other frameworks' code makes: ``python -m flotilla.agents openrlhf | verifiers | verifiers-rows``."""

import argparse
import asyncio
import json
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from flotilla.agents.episodes import Play, play_all
from flotilla.agents.openrlhf import OpenRlhfAgent, load_agent
from flotilla.agents.verifiers import VerifiersAgent, load_environment, new_client, write_rows
from flotilla.shared.errors import FlotillaError
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.task import Lane


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla.agents", description="Drive the episodes of an experiment."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    rows = kinds.add_parser(
        "verifiers-rows", help="write the rows of a verifiers environment, for the experiment's data"
    )
    rows.add_argument("environment", help="id of an installed environment, or a file with load_environment")
    rows.add_argument("output", type=Path, help="JSON lines")
    rows.add_argument("--held-out", action="store_true", help="those that it evaluates on, for the evaluation's path")
    playing = [
        kinds.add_parser("openrlhf", help="play with the AgentInstance of a file (OpenRLHF's agent_func_path)"),
        kinds.add_parser("verifiers", help="play an environment of the verifiers package"),
    ]
    playing[0].add_argument("file", type=Path)
    playing[1].add_argument("environment", help="id of an installed environment, or a file with load_environment")
    for each in playing:
        each.add_argument("experiment", help="id")
        each.add_argument("--gateway", default=os.environ.get("FLOTILLA_GATEWAY_URL", "http://127.0.0.1:8470"))
        each.add_argument("--parallel", type=int, default=16, help="episodes at a time")
    for each in (rows, playing[1]):
        each.add_argument("--options", type=json.loads, default={}, help="of load_environment, as JSON")
    return parser


async def _run(arguments: argparse.Namespace, token: str) -> int:
    async with AsyncExitStack() as stack:
        play: Play
        if arguments.kind == "openrlhf":
            limits = httpx.Limits(max_connections=arguments.parallel)
            client = await stack.enter_async_context(httpx.AsyncClient(limits=limits, verify=tls_context()))
            play = OpenRlhfAgent(load_agent(arguments.file), client)
        else:
            environment = load_environment(arguments.environment, arguments.options)
            play = VerifiersAgent(environment, await stack.enter_async_context(new_client(arguments.gateway)))
        return await play_all(arguments.gateway, arguments.experiment, token, play, parallel=arguments.parallel)


def main() -> int:
    """Play until the experiment has ended; the token is FLOTILLA_TOKEN."""
    logging.basicConfig(level=logging.WARNING)
    arguments = _parser().parse_args()
    try:
        if arguments.kind == "verifiers-rows":
            lane = Lane.EVALUATION if arguments.held_out else Lane.TRAIN
            environment = load_environment(arguments.environment, arguments.options)
            print(write_rows(environment, arguments.output, lane), "rows")
            return 0
        token = os.environ.get("FLOTILLA_TOKEN")
        if not token:
            print("FLOTILLA_TOKEN is not set: the fleet's, or a token of the scope agent", file=sys.stderr)
            return 2
        print(asyncio.run(_run(arguments, token)), "episodes")
    except FlotillaError as error:
        print(error.detail, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
