"""Sample from models of the Tinker API: ``python -P -m flotilla.services.rollout.tinker``."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.rollout.engines.process.engine import ProcessEngine
    from flotilla.services.rollout.engines.settings import EngineSettings
    from flotilla.services.rollout.tinker.images import use_one_thread
    from flotilla.services.rollout.tinker.worker import SamplingWorker, run_until_cancelled
from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.children.secret_variables import forget_secrets
from flotilla.shared.environment.settings import ServiceSettings, read_settings
from flotilla.shared.errors import ClaimLost, FlotillaError, InvalidRequest, ModelError
from flotilla.shared.service.devices import machine_devices
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.telemetry.logging import configure_logging
from flotilla.shared.tinker.capabilities import context_tokens_of
from flotilla.shared.tinker.queue import TinkerQueue

CANNOT_START, ENDED = 2, 1
SLOTS = 64


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
        configure_logging("tinker-sampler", settings.log_level, settings.log_format)
        use_one_thread()
        asyncio.run(_work(settings, Path(model)))
    except FlotillaError as error:
        sys.stderr.write(f"tinker sampler: {error.detail}\n")
        return CANNOT_START if isinstance(error, (ClaimLost, InvalidRequest, ModelError)) else ENDED
    return 0


async def _work(settings: ServiceSettings, model: Path) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    on_gpu = bool(await asyncio.to_thread(machine_devices))
    context = context_tokens_of(model)
    engine = ProcessEngine(
        EngineSettings(
            model_path=str(model),
            dtype="bfloat16" if on_gpu else "float32",
            device="cuda:0" if on_gpu else "cpu",
            slots=SLOTS,
            context_tokens=context,
            threads="auto",
        )
    )
    redis = connect(settings.redis_url)
    try:
        await engine.start()
        await run_until_cancelled(SamplingWorker(TinkerQueue(redis), engine, model, settings.data.resolve(), context))
    finally:
        await engine.close()
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(main())
