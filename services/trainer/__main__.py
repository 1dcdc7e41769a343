"""Run a trainer service: ``python -m services.trainer``."""

import sys

from services.trainer.app import create_app
from shared.errors import FlotillaError
from shared.processes import die_with_parent
from shared.serving import address_of, bind, serve
from shared.settings import read_settings
from shared.telemetry.logging import configure_logging


def main() -> int:
    """Read settings, configure logging, serve; a refusal is one sentence and exit code 2."""
    try:
        settings = read_settings()
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        configure_logging("trainer", settings.log_level)
        listening = bind(settings.host, settings.port)
        serve(create_app(settings, address_of(listening)), listening)
    except FlotillaError as error:
        sys.stderr.write(f"trainer: {error.detail}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
