"""Run a reward service: ``python -P -m flotilla.services.reward``."""

import sys

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.reward.app import create_app
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    return run_service("reward", create_app, serves_several=True)


if __name__ == "__main__":
    sys.exit(main())
