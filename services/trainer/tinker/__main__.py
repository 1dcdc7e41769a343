"""Train models of the Tinker API: ``python -P -m flotilla.services.trainer.tinker``."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    import torch
    from transformers.utils import logging as transformers_logging

    from flotilla.services.trainer.tinker.slots import Base
    from flotilla.services.trainer.tinker.trainer import Trainer
    from flotilla.services.trainer.tinker.worker import TrainingWorker
from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.children.secret_variables import forget_secrets
from flotilla.shared.clock import SystemClock
from flotilla.shared.environment.settings import read_settings
from flotilla.shared.errors import ClaimLost, FlotillaError, InvalidRequest, ModelError
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.telemetry.logging import configure_logging
from flotilla.shared.tinker.queue import TinkerQueue

CANNOT_START, ENDED = 2, 1


def main() -> int:
    """Work until told to end.

    Why it ended otherwise is one sentence: exit code 2 where a start is of no use, 1 where it may be started again.
    """
    try:
        settings, model = read_settings(), os.environ.get("FLOTILLA_TINKER_MODEL")
        if not model:
            raise InvalidRequest("FLOTILLA_TINKER_MODEL must be the directory of the base model")
        forget_secrets()
        if settings.parent_pid is not None:
            die_with_parent(settings.parent_pid)
        configure_logging("tinker-trainer", settings.log_level, settings.log_format)
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(len(usable_cores()))
        trainer = Trainer(Base(Path(model)), model, settings.data.resolve(), SystemClock())
        with suppress(asyncio.CancelledError):
            asyncio.run(_work(settings.redis_url, trainer))
    except FlotillaError as error:
        sys.stderr.write(f"tinker trainer: {error.detail}\n")
        return CANNOT_START if isinstance(error, (ClaimLost, InvalidRequest, ModelError)) else ENDED
    return 0


async def _work(redis_url: str, trainer: Trainer) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    redis = connect(redis_url)
    try:
        await TrainingWorker(TinkerQueue(redis), trainer).run()
    finally:
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(main())
