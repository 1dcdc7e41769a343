"""Run a trainer service: ``python -P -m flotilla.services.trainer``."""

import sys
from functools import partial

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.trainer.app import create_app
    from flotilla.services.trainer.hosting.hosts import SharedWorkers
    from flotilla.shared.service.main import run_service


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    # One for all services that this process is.
    create = partial(create_app, workers=SharedWorkers())
    return run_service("trainer", create, serves_several=True)


if __name__ == "__main__":
    sys.exit(main())
