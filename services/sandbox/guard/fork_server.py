"""A warm interpreter that forks into a fresh sandbox per run, and never learns what runs there.

It is ``python -s -B main.py``, held up where the interpreter imports ``sitecustomize``, which is ours: everything of
the interpreter and of the guard is loaded, and nothing of any program. The server forks a guard into the namespaces or
the uid of one run. The guard makes the place of the run, waits for one message with a stream of the service, reads the
job from it, and forks the program; when all of the run is gone, the server forks the next guard. A Python program
leaves this module: its interpreter is up already, and runs ``main.py``.

Nothing leads back from a run to the server: what a run changes is its own copy of the memory, its descriptors of the
server are closed before the program begins, and the server is not in its process namespace, or has another uid.
What runs of one server do have in common is where things lie in memory and how strings hash, chosen at its start.
"""

import ctypes
import gc
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterable
from typing import NoReturn

from services.sandbox.guard import kernel, main, namespaces, seccomp
from services.sandbox.guard.job import DONE, KILL_NAMESPACE, READY, Orders
from services.sandbox.guard.process import IsProgram

MESSAGE_BYTES = 65536
NOBODY_ASKED = 3
"""Exit code of a guard that got no job: the service is gone."""


def serve(paths: Iterable[str], modules_before: Iterable[str]) -> bool:
    """Fork one guard after the other until the service goes away; returns only in a child that is the program.

    Args:
        paths: entries of the module path that programs must not see.
        modules_before: names of the modules that every interpreter has loaded at this point.

    Returns:
        Whether the program is the interpreter of a session.
    """
    known = set(modules_before)
    os.environ.pop("PYTHONPATH", None)
    control = socket.socket(fileno=os.dup(0))
    _warm_up()
    control.send(READY)
    message = control.recv(MESSAGE_BYTES)
    try:
        if message:
            orders = Orders.from_wire(json.loads(message))
            while _run_one(control, orders):
                pass
    except IsProgram as program:
        is_session = program.is_session
        _forget(set(paths), known)
        return is_session
    os._exit(0)


def _run_one(control: socket.socket, orders: Orders) -> bool:
    """Fork the guard of the next run, and wait for the guard's end.

    Returns:
        False: the service is gone.

    Raises:
        IsProgram: in the child that is the program.
    """
    pid = namespaces.fork() if orders.confinement.kill_scope == KILL_NAMESPACE else os.fork()
    if pid == 0:
        _guard(control, orders)
    _, status = os.waitpid(pid, 0)
    if status == NOBODY_ASKED << 8:
        return False
    try:
        control.send(DONE)
    except ConnectionError:
        return False
    return True


def _guard(control: socket.socket, orders: Orders) -> NoReturn:
    """Be the guard of one run, then end.

    Raises:
        IsProgram: in the child that is the program.
    """
    try:
        place: int | Exception
        try:
            place = main.furnish(orders)
        except Exception as error:  # the service learns it when it asks
            place = error
        message, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(NOBODY_ASKED)
        control.close()
        main.attend(int.from_bytes(ancillary[0][2], sys.byteorder), place)
    except IsProgram:
        raise
    except BaseException:  # this is a copy of the server and must not go on as one
        os._exit(1)
    os._exit(0)


def _warm_up() -> None:
    """Do once what would be the same for each run."""
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for denies_metadata in (False, True):
        if platform.machine() in seccomp.ARCHITECTURES:
            seccomp.filter_for(platform.machine(), denies_metadata)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # should a guard be killed, its programs are found below the server
    gc.collect()
    gc.freeze()


def _forget(paths: "set[str]", modules_before: "set[str]") -> None:
    """Leave the interpreter as if the guard had never been imported."""
    ours = {name: module for name, module in sys.modules.items() if name not in modules_before}
    # Held for ever: taking the modules apart would cost more than the program's start, and change shared pages.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ours))
    for name in ours:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in paths]
