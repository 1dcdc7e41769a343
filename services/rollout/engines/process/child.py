"""The engine's process: a thread computes, the main one takes commands and answers them; see ``children.serving``."""

import logging
import os
import sys
import threading
import traceback
from typing import Any

from flotilla.services.rollout.engines.process.commands import Call, Close, answer_to_wire, command_from_wire
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.children.processes import collecting_later
from flotilla.shared.children.serving import serve
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.host.cores import CoreSeat
from flotilla.shared.telemetry.logging import STANDARD


class PlainLines(logging.Formatter):
    """Level, phrase and facts on a line, to be read by people in the detail of an error; the parent adds the rest."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        facts = " ".join(f"{key}={value}" for key, value in record.__dict__.items() if key not in STANDARD)
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{record.levelname.lower()}: {record.getMessage()} {facts}".rstrip() + trace


class ServedEngine:
    """The engine of some settings; its end ends the process, whatever else still runs there.

    Raises:
        FlotillaError: it cannot be loaded.
        RuntimeError: it cannot be loaded for a reason that no setting names.
    """

    about = None

    def __init__(self, opening: dict[str, Any]) -> None:
        with collecting_later():
            from flotilla.services.rollout.engines.process.in_process import THREAD, InProcessEngine
        settings = EngineSettings(**opening)
        # One with a number takes its seat, too: others compute on what it leaves.
        cores = CoreSeat(threads=None if settings.threads == "auto" else settings.threads)

        def end(failed: threading.ExceptHookArgs) -> None:
            traceback.print_exception(failed.exc_value)
            if failed.thread is not None and failed.thread.name == THREAD:
                os._exit(1)

        threading.excepthook = end
        self._engine = InProcessEngine(settings, cores)
        try:
            self._engine.begin()
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def handle(self, content: Any) -> Any:
        """Carry out a command."""
        command = command_from_wire(content)
        if isinstance(command, Call):
            return answer_to_wire(await self._engine.ask(command))
        if isinstance(command, Close):
            return await self._engine.close()
        return self._engine.post(command)


def main() -> None:
    """Serve an engine."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("flotilla").setLevel(logging.INFO)
    arm_process("engine")
    serve(ServedEngine)
    # Taking an interpreter with torch apart lasts longer than anything that is left to do here.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
