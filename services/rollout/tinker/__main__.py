"""Sample from models of the Tinker API: ``python -P -m flotilla.services.rollout.tinker``."""

import asyncio
import sys
from pathlib import Path

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from flotilla.services.rollout.engines.process.engine import ProcessEngine
    from flotilla.services.rollout.engines.settings import EngineSettings
    from flotilla.services.rollout.tinker.images import use_one_thread
    from flotilla.services.rollout.tinker.worker import SamplingWorker, run_until_cancelled
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.service.devices import machine_devices
from flotilla.shared.streams.redis.connection import connect
from flotilla.shared.tinker.capabilities import context_tokens_of
from flotilla.shared.tinker.process import end_on_sigterm, run_process
from flotilla.shared.tinker.queue import TinkerQueue
from flotilla.shared.tinker.sessions import TinkerSessions

SLOTS = 64


def main() -> int:
    """Work until a signal ends it; see ``run_process``."""
    return run_process("sampler", sample)


def sample(settings: ServiceSettings, model: str) -> None:
    """Sample until a signal ends it."""
    use_one_thread()
    asyncio.run(_work(settings, Path(model)))


async def _work(settings: ServiceSettings, model: Path) -> None:
    end_on_sigterm()
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
        queue = TinkerQueue(redis)
        sessions = TinkerSessions(redis, queue)
        await run_until_cancelled(SamplingWorker(queue, sessions, engine, model, settings.data.resolve(), context))
    finally:
        await engine.close()
        await redis.aclose()


if __name__ == "__main__":
    sys.exit(main())
