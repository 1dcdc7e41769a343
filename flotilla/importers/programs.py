"""Which of several programs that a script starts is meant."""

from collections.abc import Sequence
from typing import TypeVar

from flotilla.importers.hydra import problem

Started = TypeVar("Started")


def program_of(started: Sequence[Started], names: Sequence[str], number: int, source: str) -> Started:
    """Choose a program by its number.

    Args:
        started: programs of a system, in the script's order.
        names: of each, for the message.
        number: counted from 1, as ``--program`` has it.
        source: of the script.

    Raises:
        InvalidSpec: there is none of this number.
    """
    if not 1 <= number <= len(started):
        raise problem(source, number, f"--program counts what the script starts: {listed(names) or 'nothing'}")
    return started[number - 1]


def listed(names: Sequence[str]) -> str:
    """Write programs with their numbers."""
    return ", ".join(f"{number} is {name}" for number, name in enumerate(names, 1))


def which(names: Sequence[str]) -> str:
    """Ask which of several programs is meant."""
    return f"say which is meant with --program N: {listed(names)}"
