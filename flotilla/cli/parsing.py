"""Parsing common to all commands; suggests similar words for an unknown one."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.log_rotation import USUAL_MEBIBYTES, USUAL_OLDER
from flotilla.defaults import DEFAULT_DATA

MAX_NOTICE_SECONDS = 86_400
MAX_PORT = 65_535
MOST_SEEDS = 64
LIFE_UNITS = {"m": 60, "h": 3600, "d": 86_400}
SIZE_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Parser(argparse.ArgumentParser):
    """Reads arguments; options are written whole, so that a new one never changes what an old script means."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse at once what is not known, where the options that could be meant are known."""
        if not (sys.argv[1:] if args is None else args) and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(ExitCode.USAGE)
        found, rest = super().parse_known_args(args, namespace)
        many = next(
            (action.dest for action in self._actions if action.nargs in {"*", "+"} and not action.option_strings), None
        )
        if many is not None:
            # argparse takes those before the first option alone.
            setattr(found, many, [*getattr(found, many), *(word for word in rest if not word.startswith("-"))])
            rest = [word for word in rest if word.startswith("-")]
        if rest:
            self._refuse(rest)
        return found, rest

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        unknown = next((word.split("=", 1)[0] for word in words if word.startswith("-")), None)
        if unknown is None:
            self.error(f"unexpected {'arguments' if len(words) > 1 else 'argument'}: {' '.join(words)}")
        options = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown option {unknown}{meant(unknown, options)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # Each of the commands in the message would hide the one that is meant.
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = list(action.choices)
            what = (action.metavar or "command") if isinstance(action.metavar, str) else "command"
            hint = meant(str(value), names) or f": choose from {', '.join(names)}"
            self.error(f"unknown {what.lower()} {str(value)!r}{hint}")
        super()._check_value(action, value)


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]


def meant(word: str, known: Sequence[str]) -> str:
    """Write ``: did you mean ...?`` for a misspelt word; empty where nothing is near."""
    near = get_close_matches(word, known, n=3, cutoff=0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def add_command(commands: "Commands", name: str, text: str, function: str) -> Parser:
    """Describe one command.

    Args:
        commands: where it is added.
        name: as it is typed.
        text: one sentence.
        function: module below ``flotilla.cli.commands`` and function, such as ``fleet:up``; imported when it is run.
    """
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(function=function)
    return parser


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add which gateway is asked."""
    parser.add_argument("--data", default=DEFAULT_DATA, help="data directory of the local fleet (%(default)s)")
    parser.add_argument("--gateway", help="URL of a gateway (default: FLOTILLA_GATEWAY_URL, else the local fleet)")


def add_json(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def add_experiment(parser: argparse.ArgumentParser, *, is_needed: bool = False, or_directory: bool = False) -> None:
    """Add the experiment that is meant: ``arguments.experiment``."""
    text = "id, its beginning, or name"
    if or_directory:
        text += "; or a directory, such as runs/NAME"
    if is_needed:
        parser.add_argument("experiment", help=text)
    else:
        parser.add_argument("experiment", nargs="?", help=f"{text} (default: the one that is active, else the newest)")


def add_spec(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    """Add an experiment file and what overrides it."""
    parser.add_argument("spec", nargs=None if is_needed else "?", help="experiment file, YAML or JSON")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add what overrides a spec."""
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, such as optimisation.steps=10")
    parser.add_argument("--seed", type=at_least_zero, help="the experiment's seed (default: as written, else 0)")


def add_fleet(parser: argparse.ArgumentParser, default_port: int, *, follows_file: bool) -> None:
    """Add what a local fleet consists of; one for a file has what that asks for."""
    for option, what, key in (
        ("--rollouts", "rollout services", "resources.rollouts.min"),
        ("--trainers", "trainers, of which an experiment takes parallelism.nodes", "parallelism.nodes"),
        ("--rewards", "reward services", "resources.rewards.min"),
        ("--sandboxes", "sandbox services", "resources.sandboxes.min"),
    ):
        default = f"{key} of the file" if follows_file else "1"
        parser.add_argument(option, type=at_least_one, help=f"{what} (default: {default})")
    text = "port of the gateway, 0 for any free one (%(default)s)"
    parser.add_argument("--port", type=port, default=default_port, help=text)
    parser.add_argument(
        "--redis-url",
        default=os.environ.get("FLOTILLA_REDIS_URL"),
        help="Redis or Valkey server to use (default: FLOTILLA_REDIS_URL, else one of its own)",
    )
    text = "least severe level that the services log (%(default)s)"
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help=text)
    text = "size in MiB at which the log of a process is put aside (%(default)s)"
    parser.add_argument("--log-size", type=at_least_one, default=USUAL_MEBIBYTES, metavar="MIB", help=text)
    text = "logs of a process that are kept beside the one that is written (%(default)s)"
    parser.add_argument("--log-files", type=at_least_one, default=USUAL_OLDER, metavar="N", help=text)


def add_experiments(parser: argparse.ArgumentParser, who: str, default: int | None) -> None:
    """Add how many experiments a process serves at a time."""
    text = "experiments that %s serves at a time, on one base where they train adapters (default: 1)"
    parser.add_argument("--experiments", type=at_least_one, default=default, metavar="N", help=text % who)


def seconds(text: str) -> float:
    """Read a number of seconds, such as a notice."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_NOTICE_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to {MAX_NOTICE_SECONDS}, got {text!r}")
    return value


def life(text: str) -> float | None:
    """Read how long a token lasts, in seconds; None for ever."""
    if text == "never":
        return None
    count, unit = text[:-1], text[-1:]
    if not (count.isascii() and count.isdigit() and unit in LIFE_UNITS and int(count) > 0):
        raise argparse.ArgumentTypeError("must be a number with m, h or d, such as 90d, or never")
    return float(int(count) * LIFE_UNITS[unit])


def size(text: str) -> int:
    """Read a size in bytes, such as ``500GB``; the units are powers of ten."""
    number = text.rstrip("BkMGT")
    unit = text[len(number) :] or "B"
    if not (number.isascii() and number.isdigit() and unit in SIZE_UNITS):
        raise argparse.ArgumentTypeError(
            f"must be a whole number with {', '.join(SIZE_UNITS)}, such as 500GB, got {text!r}"
        )
    return int(number) * SIZE_UNITS[unit]


def at_least_zero(text: str) -> int:
    """Read a count that may be zero, or a seed."""
    return _whole_number(text, 0)


def at_least_one(text: str) -> int:
    """Read a count."""
    return _whole_number(text, 1)


def at_least_two(text: str) -> int:
    """Read a whole number of at least 2."""
    return _whole_number(text, 2)


def above_zero(text: str) -> float:
    """Read a number above 0."""
    if (value := amount(text)) == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return value


def amount(text: str) -> float:
    """Read a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text!r}")
    return value


def seeds(text: str) -> int:
    """Read how many seeds an experiment is run with."""
    return _whole_number(text, 2, MOST_SEEDS)


def port(text: str) -> int:
    """Read a port; 0 is any free one."""
    return _whole_number(text, 0, MAX_PORT)


def _whole_number(text: str, least: int, most: int | None = None) -> int:
    # argparse would name the function that reads the value, not what is allowed.
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
    return value
