"""How a process of the Tinker API starts and ends."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.environment.secret_variables import forget_secrets
from flotilla.shared.environment.settings import ServiceSettings, read_settings
from flotilla.shared.errors import ClaimLost, FlotillaError, InvalidRequest, ModelError
from flotilla.shared.telemetry.logging import configure_logging

CANNOT_START, ENDED = 2, 1


def run_process(kind: str, work: Callable[[ServiceSettings, str], None]) -> int:
    """Work until a signal ends it.

    Why it ended otherwise is one sentence.

    Args:
        kind: trainer or sampler.
        work: what is done, with the directory of the base model.

    Returns:
        The exit code: 2 where another start is of no use, 1 where it may be started again.
    """
    try:
        settings, model = read_settings(), os.environ.get("FLOTILLA_TINKER_MODEL")
        if not model:
            raise InvalidRequest("FLOTILLA_TINKER_MODEL must be the directory of the base model")
        forget_secrets()
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        configure_logging(f"tinker-{kind}", settings.log_level, settings.log_format)
        work(settings, model)
    except FlotillaError as error:
        sys.stderr.write(f"tinker {kind}: {error.detail}\n")
        return CANNOT_START if isinstance(error, (ClaimLost, InvalidRequest, ModelError)) else ENDED
    return 0


def end_on_sigterm() -> None:
    """Cancel the calling task when the process receives a signal to end."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
