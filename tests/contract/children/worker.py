"""A child of the suite: it does to its owner whatever a call says."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from flotilla.shared.children.serving import progress_of_call, serve
from flotilla.shared.errors import DataError


def do(what: str) -> Any:
    """Do something at once."""
    match what:
        case "die":
            print("the reason", file=sys.stderr, flush=True)
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "flood":
            for _ in range(200):
                os.write(2, b"x" * 65536)
                print("y" * 65536)
        case "half":
            os.write(3, b"[0, ")
            os._exit(0)
        case "half and silence":
            os.write(3, b"[0, ")
            time.sleep(600)
        case "garbage":
            os.write(3, b"chatter\n")
            time.sleep(600)
        case "nested":
            os.write(3, b"[" * 100_000 + b"\n")
            time.sleep(600)
        case "fork and die":
            if os.fork() == 0:
                # It leads no session, yet ends no sooner than its group is killed.
                time.sleep(600)
            os._exit(7)
        case "odd":
            raise DataError("no such row", row=object())
        case "cancelled":
            raise asyncio.CancelledError
        case "large":
            os.write(3, b"z" * (1 << 20))
            time.sleep(600)
        case "refuse":
            raise DataError("no such row", errors=[{"field": "row"}], row=7)
        case "progress":
            progress_of_call()(1)
            thread = threading.Thread(target=progress_of_call(), args=(2,))
            thread.start()
            thread.join()
        case "told":
            return TOLD
        case "raise":
            raise KeyError("x")
        case "object":
            return object()
        case "leave":
            # A child of its own that outlives it, and holds all it has.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
            return child.pid
        case "environment":
            return dict(os.environ)
        case "input":
            return sys.stdin.read()
    TOLD.append(what)
    return what


TOLD: list[Any] = []


class InTurn:
    """Answers one call at a time."""

    about = os.getpid()

    def handle(self, content: Any) -> Any:
        """Do what is asked, after some seconds if it is a number."""
        if isinstance(content, float):
            time.sleep(content)
            return content
        return do(content)


class AtOnce(InTurn):
    """Answers many at a time."""

    async def handle(self, content: Any) -> Any:
        """See ``InTurn``."""
        if isinstance(content, float):
            await asyncio.sleep(content)
            return content
        return do(content)


def load(opening: Any) -> Any:
    """Load what is told, or fail at it."""
    kind, what = opening
    if what == "hang":
        time.sleep(600)
    do(what)
    return {"in turn": InTurn, "at once": AtOnce}[kind]()


if __name__ == "__main__":
    print("printed before it serves, without an end of line " + "x" * 300_000, end="", flush=True)
    serve(load, is_confined=True)
