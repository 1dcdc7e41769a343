"""Run a rollout service: ``python -P -m services.rollout``."""

import sys

from services.rollout.app import create_app
from shared.service_main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    return run_service("rollout", create_app)


if __name__ == "__main__":
    sys.exit(main())
