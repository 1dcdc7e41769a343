"""The embedded engine in a process of its own: torch lives there alone, and its death is an error, not ours."""

import logging
from contextlib import suppress

from flotilla.services.rollout.engines.process.commands import (
    Answer,
    Call,
    Close,
    Command,
    answer_from_wire,
    command_to_wire,
)
from flotilla.services.rollout.engines.process.remote import RemoteEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.serving import MAX_LINE_BYTES
from flotilla.shared.children.spawning import child_environment
from flotilla.shared.errors import FlotillaError
from flotilla.shared.host.cores import usable_cores

log = logging.getLogger(__name__)

CHILD = "flotilla.services.rollout.engines.process.child"
SPIN_COUNT = "30000"
"""Turns that a thread waits for the next product before it sleeps, some tens of microseconds: there are five in each
layer, and to wake it costs as much."""


class ProcessEngine(RemoteEngine):
    """An ``Engine`` that runs ``TorchEngine`` in a child process.

    It is started once; after its child's death or a ``close``, make another.

    Args:
        settings: all that the child needs.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.call_seconds)
        self._close_seconds = settings.close_seconds
        threads = str(len(usable_cores()) if settings.threads == "auto" else settings.threads)
        # A second thread pool that spins makes both several times slower, so idle threads sleep.
        environment = child_environment(
            OMP_WAIT_POLICY="PASSIVE",
            GOMP_SPINCOUNT=SPIN_COUNT,
            OMP_NUM_THREADS=threads,
            MKL_NUM_THREADS=threads,
            PYTHONUNBUFFERED="1",
        )
        self._calls = CallProcess(
            python_module(CHILD),
            settings.to_wire(),
            "the engine",
            environment=environment,
            start_seconds=settings.start_seconds,
            max_line_bytes=MAX_LINE_BYTES,
            on_line=lambda line: log.info("engine output", extra={"line": line}),
            blames_opening=False,
        )

    @property
    def process_id(self) -> int | None:
        """The child's process id, while it runs."""
        child = self._calls.child
        return None if child is None or child.has_ended else child.process.pid

    def hide_last_words(self) -> None:
        """Omit the last log lines when the process ends: they may be of another experiment."""
        if self._calls.child is not None:
            self._calls.child.words.hide()

    async def start(self) -> None:
        """Start the child and load the model; see ``Engine.start``.

        Raises:
            ModelError: the model cannot be loaded.
            DeadlineExceeded: ``start_seconds`` went by: a cold disk or a crowded machine is no fault of the model.
            WorkerDied: the child ended while it loaded.
        """
        await self._calls.start()

    async def close(self) -> None:
        """Abort what is in flight and end the child, by force after ``close_seconds``; see ``Engine.close``."""
        try:
            with suppress(FlotillaError):
                await self._calls.call(command_to_wire(Close()), seconds=self._close_seconds)
        finally:
            await self._calls.aclose()

    async def ask(self, call: Call) -> Answer:
        """See ``RemoteEngine.ask``."""
        return answer_from_wire(await self._calls.call(command_to_wire(call)))

    def post(self, command: Command) -> None:
        """See ``RemoteEngine.post``."""
        self._calls.tell(command_to_wire(command))
