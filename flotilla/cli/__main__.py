"""The ``flotilla`` command."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from flotilla.connection import DEFAULT_DATA
from shared.errors import FlotillaError

Command = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130
DEFAULT_PORT = 8470
MAX_NOTICE_SECONDS = 86_400


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="flotilla", description="An asynchronous RL post-training fleet.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_fleet(commands)
    _add_membership(commands)
    _add_experiments(commands)
    _add_files(commands)
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text)


def _fleet_options(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--rollouts", type=_at_least_one, help="rollout services")
    parser.add_argument("--trainers", type=_at_least_one, help="trainer services: one for each experiment at a time")
    parser.add_argument("--rewards", type=_at_least_one, help="reward services")
    parser.add_argument("--sandboxes", type=_at_least_one, help="sandbox services")
    parser.add_argument("--port", type=int, default=port, help="port of the gateway, 0 for any free one (%(default)s)")
    parser.add_argument(
        "--redis-url",
        default=os.environ.get("FLOTILLA_REDIS_URL"),
        help="Redis or Valkey server to use (default: FLOTILLA_REDIS_URL, else one of its own)",
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])


def _spec_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", help="experiment file, YAML or JSON")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, such as optimisation.steps=10")
    parser.add_argument("--seed", type=int, help="the experiment's seed")


def _gateway_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=DEFAULT_DATA, help="data directory of the local fleet (%(default)s)")
    parser.add_argument("--gateway", help="URL of a gateway (default: FLOTILLA_GATEWAY_URL, else the local fleet)")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MAX_NOTICE_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to {MAX_NOTICE_SECONDS}")
    return value


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from flotilla.cli.commands import run

    parser = _add(commands, "run", "Run one experiment on a fleet of its own, show its result, leave nothing running.")
    _spec_options(parser)
    _fleet_options(parser, port=0)
    parser.add_argument("--runs", default="runs", help="where run directories are made (%(default)s)")
    parser.add_argument("--name", help="name of the run directory (default: the experiment's name)")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    parser.set_defaults(function=run.run)


def _add_fleet(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from flotilla.cli.commands import fleet

    up = _add(commands, "up", "Start a fleet on this machine.")
    _fleet_options(up, port=DEFAULT_PORT)
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    up.add_argument("--data", default=DEFAULT_DATA, help="data directory (%(default)s)")
    up.add_argument("--no-sandbox", action="store_true", help="start no sandbox service")
    up.add_argument("--detach", "-d", action="store_true", help="leave it running and return")
    up.set_defaults(function=fleet.up)
    down = _add(commands, "down", "End the fleet on this machine.")
    down.add_argument("--data", default=DEFAULT_DATA, help="data directory (%(default)s)")
    down.set_defaults(function=fleet.down)
    status = _add(commands, "status", "List services and experiments.")
    _gateway_options(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(function=fleet.status)


def _add_membership(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from flotilla.cli.commands import membership

    rollout = _add(commands, "rollout", "Start one more rollout service for a fleet that runs; SIGTERM lets it leave.")
    _gateway_options(rollout)
    rollout.add_argument("--notice", type=_seconds, help="seconds it may take to leave after SIGTERM (default: 25)")
    rollout.set_defaults(function=membership.rollout)
    drain = _add(commands, "drain", "Let a rollout finish or hand over its work, and leave the fleet.")
    drain.add_argument("service", help="id of the service, see `flotilla status`")
    drain.add_argument("--notice", type=_seconds, help="seconds it may take (default: 30)")
    _gateway_options(drain)
    drain.set_defaults(function=membership.drain)


def _add_experiments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from flotilla.cli.commands import experiment

    start = _add(commands, "start", "Create and start an experiment on a fleet that runs.")
    _spec_options(start)
    _gateway_options(start)
    start.set_defaults(function=experiment.start)
    prepare = _add(commands, "prepare", "Make what an experiment file needs, and print the spec to send over REST.")
    _spec_options(prepare)
    prepare.set_defaults(function=experiment.prepare)
    for name, text in (
        ("stop", "Stop an experiment; its checkpoints stay."),
        ("pause", "Pause an experiment."),
        ("resume", "Let a paused experiment go on."),
    ):
        parser = _add(commands, name, text)
        parser.add_argument("experiment", nargs="?", help="id or name (default: the only one that runs)")
        _gateway_options(parser)
        parser.set_defaults(function=experiment.action(name))
    watch = _add(commands, "watch", "Follow an experiment.")
    watch.add_argument("experiment", nargs="?", help="id or name (default: the only one that runs)")
    watch.add_argument("--plain", action="store_true", help="lines instead of a live view")
    _gateway_options(watch)
    watch.set_defaults(function=experiment.watch)
    diagnose = _add(commands, "diagnose", "Say what bounds an experiment's speed, and what would change it.")
    diagnose.add_argument("experiment", nargs="?", help="id or name (default: the only one that runs)")
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    _gateway_options(diagnose)
    diagnose.set_defaults(function=experiment.diagnose)
    ledger = _add(commands, "ledger", "Show where every issued group is.")
    ledger.add_argument("experiment", nargs="?", help="id or name (default: the only one that runs)")
    ledger.add_argument("--json", action="store_true", help="print JSON")
    _gateway_options(ledger)
    ledger.set_defaults(function=experiment.ledger)


def _add_files(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from flotilla.cli.commands import import_file, spec

    spec.add_parsers(commands)
    import_file.add_parsers(commands)


async def _until_done(command: Command, arguments: argparse.Namespace) -> int:
    task = asyncio.create_task(command(arguments))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # One signal ends everything in order; the same again changes nothing, so that nothing is left behind.
        loop.add_signal_handler(number, task.cancel)
    return await task


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a problem is one clear message and an exit code, never a traceback."""
    arguments = build_parser().parse_args(argv)
    command: Command = arguments.function
    try:
        return asyncio.run(_until_done(command, arguments))
    except FlotillaError as error:
        sys.stderr.write(f"flotilla: {error.detail}\n")
        return EXIT_PROBLEM
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("flotilla: ended by request\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_PROBLEM
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"flotilla: {where}{error.strerror or error}\n")
        return EXIT_PROBLEM


if __name__ == "__main__":
    sys.exit(main())
