"""Run a trainer service: ``python -P -m flotilla.services.trainer``."""

import sys

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.trainer.app import create_app
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    return run_service("trainer", create_app)


if __name__ == "__main__":
    sys.exit(main())
