"""Run a rollout service: ``python -P -m flotilla.services.rollout``."""

import sys

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.rollout.app import create_app
    from flotilla.shared.models.prompts import keep_torch_out
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    keep_torch_out()  # it lives in the engine's process and in the weight endpoint
    return run_service("rollout", create_app)


if __name__ == "__main__":
    sys.exit(main())
