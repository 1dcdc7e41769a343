"""The inside of a member process: form the group, then carry out the service's commands one after the other.

It sends ``["opened", port of the store]`` as rank 0, ``["joined"]``, for each command ``["arrived", bytes]`` where that
asks for it and ``["done", checksum]``, or once ``["failed", detail, whether it was too late]``.

The main thread reads the endpoint's socket and ends the process when it closes, also while the other thread is stuck in
a collective. After any failure the process ends: its peers then see closed connections instead of a silent member.
"""

import json
import os
import queue
import socket
import threading
import time
import traceback
from typing import NoReturn

from flotilla.shared.errors import FlotillaError
from flotilla.shared.weights.group.endpoint_protocol import Command, Opening
from flotilla.shared.weights.group.group import WeightGroup

_TIMEOUT_SLACK_SECONDS = 0.1
"""A failure this close to its deadline is one of time."""


def serve(control: socket.socket, opening: Opening) -> NoReturn:
    """Be a member of the group until the service closes the socket, kills the process or something fails."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(control, opening, commands), name="collectives", daemon=True).start()
    with control.makefile("rb") as lines:
        for line in lines:
            commands.put(Command.model_validate_json(line))
    # Not sys.exit: it would wait for a collective that may never return.
    os._exit(0)


def _work(control: socket.socket, opening: Opening, commands: "queue.SimpleQueue[Command]") -> None:
    deadline = time.monotonic() + opening.timeout_seconds
    try:
        group = WeightGroup(opening, on_opened=lambda port: _tell(control, "opened", port))
        _tell(control, "joined")
        while True:
            command = commands.get()
            deadline = time.monotonic() + command.deadline_seconds
            _tell(control, "done", group.transfer(command, lambda count: _tell(control, "arrived", count)))
    except (RuntimeError, OSError, FlotillaError) as error:
        is_timeout = time.monotonic() > deadline - _TIMEOUT_SLACK_SECONDS
        _tell(control, "failed", _first_line(error), is_timeout)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)


def _tell(control: socket.socket, *message: object) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0]
