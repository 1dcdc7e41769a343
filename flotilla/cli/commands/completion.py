"""``flotilla completion``: what a shell needs to complete commands and options."""

import argparse
import sys

import shtab

from flotilla.cli.command_line import build_parser


async def completion(arguments: argparse.Namespace) -> int:
    """Print a completion script."""
    sys.stdout.write(shtab.complete(build_parser(), shell=arguments.shell))
    return 0
