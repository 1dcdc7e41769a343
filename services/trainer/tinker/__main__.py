"""Train models of the Tinker API: ``python -P -m flotilla.services.trainer.tinker``."""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    import torch
    from transformers.utils import logging as transformers_logging

    from flotilla.services.trainer.tinker.slots import Base
    from flotilla.services.trainer.tinker.trainer import MOST_MODELS, Trainer
    from flotilla.services.trainer.tinker.worker import TrainingWorker
from flotilla.shared.clock import SystemClock
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.process import end_on_sigterm, run_process
from flotilla.shared.tinker.queue import TinkerQueue
from flotilla.shared.tinker.sessions import TinkerSessions


def main() -> int:
    """Work until a signal ends it; see ``run_process``."""
    return run_process("trainer", train)


def train(settings: ServiceSettings, model: str) -> None:
    """Train until a signal ends it."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(len(usable_cores()))
    most = int(os.environ.get("FLOTILLA_TINKER_MODELS", MOST_MODELS))
    data = settings.data.resolve()
    # The default share of a key.
    most_gb = os.environ.get("FLOTILLA_TINKER_DISK_GB")
    most_bytes = shutil.disk_usage(data).total // 2 if most_gb is None else int(most_gb) * 10**9
    base = Base(Path(model))
    trainer = Trainer(base, model, data, SystemClock(), most_models=most, most_disk_bytes=most_bytes)
    with suppress(asyncio.CancelledError):
        asyncio.run(_work(settings.redis_url, trainer))


async def _work(redis_url: str, trainer: Trainer) -> None:
    end_on_sigterm()
    redis = connect(redis_url)
    try:
        queue = TinkerQueue(redis)
        await TrainingWorker(queue, TinkerSessions(redis, queue), trainer).run()
    finally:
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(main())
