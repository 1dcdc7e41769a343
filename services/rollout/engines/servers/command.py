"""Command lines and environments of servers; pure functions."""

import socket
from collections.abc import Mapping

from flotilla.shared.config.sections.engine import Options

HOST = "127.0.0.1"
FORBIDDEN_PREFIXES = ("FLOTILLA_", "PYTHON", "VIRTUAL_ENV")
"""Of our variables: packages of two environments must not meet, and a server needs no secrets of the fleet."""


def flags(options: Options, *, negates: bool) -> list[str]:
    """Write options as a command line: true is a bare flag, null is none at all.

    Args:
        options: values by name.
        negates: whether false is the flag ``--no-NAME``; else it is none at all.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None or (value is False and not negates):
            continue
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if isinstance(value, tuple | list):
            words += [flag, *(str(item) for item in value)]
        elif isinstance(value, bool):
            words.append(flag)
        else:
            words += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
    return words


def plain_names(options: Options | None) -> Options:
    """Write the names of options as Python does."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in (options or {}).items()}


def clean_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Make a server's environment of ours: nothing of our packages, nothing of the fleet's secrets."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(FORBIDDEN_PREFIXES)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Find a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
