"""``flotilla engine install``: an engine's server in an environment of its own."""

import argparse
import subprocess
from pathlib import Path

from flotilla.cli.output import new_console
from flotilla.pinned_engines import engine_named, install_engine, run_command
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.errors import InvalidRequest


async def install(arguments: argparse.Namespace) -> int:
    """Create the environment, and print the variable that points a fleet to it."""
    engine = engine_named(arguments.engine)
    path = _absolute(arguments.path or f".venv-{engine.name}")
    console = new_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    try:
        is_new = await install_engine(engine, path, arguments.device, run_command, say)
    except subprocess.CalledProcessError as error:
        raise InvalidRequest(
            f"{' '.join(error.cmd)} ended with code {error.returncode}: nothing was installed"
        ) from None
    say(f"{path} {'has' if is_new else 'has already'} {engine.name} {engine.version} for {arguments.device}")
    say(f"export {ENGINE_PYTHONS[engine.name]}={path}/bin/python")
    return 0


def _absolute(path: str) -> Path:
    return Path(path).absolute()
