"""The ``flotilla`` command."""

import argparse
import asyncio
import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from flotilla.cli.command_line import build_parser
from flotilla.cli.exit_codes import ExitCode, exit_code_of
from flotilla.shared.children.processes import collecting_later
from flotilla.shared.errors import FlotillaError

Command = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]


def find_command(function: str) -> Command:
    """Import what carries out a command, such as ``fleet:up``."""
    module, name = function.split(":")
    command: Command = getattr(importlib.import_module(f"flotilla.cli.commands.{module}"), name)
    return command


async def _until_done(command: Command, arguments: argparse.Namespace) -> int:
    task = asyncio.create_task(command(arguments))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # One signal ends everything in order, another one at once: see ``LocalFleet``. Nothing is left behind.
        loop.add_signal_handler(number, task.cancel)
    return await task


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a problem is one clear message and an exit code, never a traceback."""
    arguments = build_parser().parse_args(argv)
    arguments.owns_process = argv is None
    try:
        with collecting_later() if arguments.owns_process else contextlib.nullcontext():
            command = find_command(arguments.function)
        return asyncio.run(_until_done(command, arguments))
    except FlotillaError as error:
        sys.stderr.write(f"flotilla: {error.detail}\n")
        return exit_code_of(error)
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("flotilla: ended by request\n")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return ExitCode.FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"flotilla: {where}{error.strerror or error}\n")
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
