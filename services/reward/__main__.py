"""Run a reward service: ``python -P -m services.reward``."""

import sys

from shared.interpreter import collecting_later

with collecting_later():
    from services.reward.app import create_app
    from shared.service_main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    return run_service("reward", create_app)


if __name__ == "__main__":
    sys.exit(main())
