"""Run a rollout service: ``python -P -m flotilla.services.rollout``."""

import sys
from functools import partial

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.rollout.app import create_app
    from flotilla.services.rollout.engines.shared.pool import SharedEngines
    from flotilla.shared.models.prompts import keep_torch_out
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    keep_torch_out()  # it lives in the engine's process and in the weight endpoint
    # One for all services that this process is.
    create = partial(create_app, shared=SharedEngines())
    return run_service("rollout", create, serves_several=True)


if __name__ == "__main__":
    sys.exit(main())
