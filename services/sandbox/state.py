"""All that the service opens at its start."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from flotilla.services.sandbox.boxes.opening import open_boxes
from flotilla.services.sandbox.executor import LOCAL, Executor
from flotilla.services.sandbox.languages import Language
from flotilla.services.sandbox.local import open_here
from flotilla.services.sandbox.metrics import SandboxMetrics
from flotilla.services.sandbox.pool import SlotPool
from flotilla.services.sandbox.running import Runner
from flotilla.services.sandbox.sessions import Sessions
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.spare_time import SpareTime, read_busy_seconds
from flotilla.shared.schemas.sandbox import IsolationLevel


@dataclass(frozen=True)
class SandboxState:
    """What the routes need.

    Attributes:
        runner: runs a program; knows how it is shut in.
        pool: whose turn it is.
        sessions: interpreters that are kept, in slots of their own.
        languages: what can be run, by name.
        unavailable: why each better level of isolation is not used.
        spare: what there is for callers that have used much.
    """

    settings: SandboxSettings
    runner: Runner
    pool: SlotPool
    sessions: Sessions
    languages: dict[str, Language]
    unavailable: dict[IsolationLevel, str]
    metrics: SandboxMetrics
    spare: SpareTime

    @property
    def executor(self) -> Executor:
        """What runs programs on this machine; a service with a provider has none."""
        assert isinstance(self.runner, Executor)
        return self.runner


@asynccontextmanager
async def open_state(settings: SandboxSettings) -> AsyncIterator[SandboxState]:
    """Open what runs programs, and the queue for it.

    Raises:
        Unavailable: no allowed level of isolation works here; the detail has the reason for each.
        InvalidRequest: the configured interpreter cannot be used, or the provider has no key.
        ProviderFailed: the provider refuses its key.
    """
    num_programs = settings.concurrency + settings.spare
    num_sessions = settings.sessions + settings.spare if settings.sessions else 0
    num_slots = num_programs + num_sessions
    spare = SpareTime(
        os.cpu_count() or 1,
        least=settings.busy_part,
        now=time.monotonic,
        busy=read_busy_seconds,
        own=time.process_time,
    )
    is_local = settings.provider == LOCAL
    async with open_here(settings, num_slots, spare) if is_local else open_boxes(settings, num_slots) as opened:
        make_pool = partial(
            SlotPool,
            spare=settings.spare,
            max_queued=settings.max_queued,
            queue_seconds=settings.queue_seconds,
            renewed=opened.runner.renewed,
        )
        # A session holds its slot also while it runs nothing.
        pool = make_pool(opened.slots[:num_programs], has_one=spare.is_bounded)
        session_pool = make_pool(opened.slots[num_programs:])
        metrics = SandboxMetrics()
        sessions = Sessions(opened.runner, session_pool, settings, opened.python, metrics)
        try:
            yield SandboxState(
                settings, opened.runner, pool, sessions, opened.languages, opened.unavailable, metrics, spare
            )
        finally:
            opened.runner.wind_down()
            await sessions.close()
            for part in (pool, session_pool):
                await part.close()
