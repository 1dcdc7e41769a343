"""The engine's process: ``python -m flotilla.services.rollout.engines.process.child --socket FD --parent PID``.

The main thread runs the engine; another reads commands from the inherited socket. The process ends when it is told
to, when the socket is closed, or when its parent dies.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

from flotilla.services.rollout.engines.process.commands import Close, Result, command_from_wire, result_to_wire
from flotilla.services.rollout.engines.process.framing import encode, receive_message
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.children.interpreter import collecting_later
from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.errors import FlotillaError
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


def serve(connection: socket.socket) -> None:
    """Load the engine that the first message describes, and serve it until told to close or the socket ends."""
    settings = EngineSettings(**receive_message(connection))
    with collecting_later():
        from flotilla.services.rollout.engines.embedded.engine import TorchEngine, use_threads
        from flotilla.services.rollout.engines.process.driver import EngineDriver

    def send(message: dict[str, Any]) -> None:
        connection.sendall(encode(message))

    def reply(call: int, result: Result) -> None:
        send({"call": call, "result": result_to_wire(result)})

    try:
        # One with a number takes its seat, too: others compute on what it leaves.
        cores = CoreSeat(threads=None if settings.threads == "auto" else settings.threads)
        use_threads(cores.begin())
        engine = TorchEngine(settings)
    except FlotillaError as error:
        send({"call": 0, "result": result_to_wire(error)})
        return
    if settings.threads == "auto" and not engine.gains_by_threads:
        cores.fix(1)
    driver = EngineDriver(engine, reply, cores)
    threading.Thread(target=_read, args=(connection, driver), name="commands", daemon=True).start()
    reply(0, None)
    driver.run()


def _read(connection: socket.socket, driver: Any) -> None:
    try:
        while True:
            driver.post(command_from_wire(receive_message(connection)))
    except EOFError:
        pass
    finally:
        driver.post(Close())  # Whatever ended the reading: an engine that hears nothing more must not stay.


def main() -> None:
    """Read the arguments, tie this process to its parent, and serve."""
    parser = argparse.ArgumentParser(description="The embedded engine's process.")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent, with_signal=signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when an interrupt ends the engine.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("flotilla").setLevel(logging.INFO)
    arm_process("engine")
    with socket.socket(fileno=arguments.socket) as connection:
        try:
            serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logging.getLogger(__name__).info("the parent closed the connection")
    # Taking an interpreter with torch apart lasts longer than anything that is left to do here.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
