"""A child of the suite that forks children of its own, which do whatever a call says."""

import asyncio
import os
import signal
import socket
import sys
import time
from typing import Any

from flotilla.shared.children.serving import serve
from flotilla.shared.children.spawning import Forked


def act(control: socket.socket, what: str) -> None:
    """Be such a child."""
    control.sendall(b"first\nsecond\n")
    match what:
        case "die":
            print("the reason", file=sys.stderr, flush=True)
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "silent":
            time.sleep(600)
        case "flood":
            for number in (1, 2) * 100:
                os.write(number, b"x" * 65536)
            os._exit(0)
        case "half":
            control.sendall(b"not whole")
            os._exit(0)
        case "raise":
            raise KeyError("x")
        case "return":
            return
        case "descriptors":
            # One more is that of the directory which is listed.
            control.sendall(f"{len(os.listdir('/proc/self/fd')) - 1}\n".encode())
            os._exit(0)
        case "hear":
            control.sendall(control.recv(100))
            os._exit(0)


class Forker:
    """Forks one child for each call, and returns its id, its lines and its cause of death."""

    about = None

    async def handle(self, what: str) -> Any:
        """Fork one; those that do not end by themselves are killed, or left where the call says so."""
        lines: list[str] = []
        both = asyncio.Event()

        def hear(line: bytes) -> None:
            lines.append(line.decode())
            if len(lines) == 2:
                both.set()

        child = Forked(lambda control: act(control, what.removesuffix(" and leave")), hear)
        await both.wait()
        if what.endswith(" and leave"):
            return child.pid
        if what == "hear":
            child.tell(b"heard\n")
        if what in {"stop", "silent"}:
            child.kill()
        cause = await child.cause
        child.kill()  # nothing happens: its number may be another's
        return [lines, cause]


if __name__ == "__main__":
    serve(lambda _: Forker())
