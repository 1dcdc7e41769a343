"""Run a reward service: ``python -P -m flotilla.services.reward``."""

import sys

import uvloop

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.reward.app import create_app
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    # For a short answer most of the work is to wake, read a few bytes and answer: this loop does it in C.
    return run_service("reward", create_app, serves_several=True, new_loop=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
