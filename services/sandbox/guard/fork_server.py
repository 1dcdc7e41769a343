"""A warm interpreter that forks into a fresh sandbox per run, and never learns what runs there.

It is ``python -s -B main.py``, held up where the interpreter imports ``sitecustomize``, which is ours: everything of
the interpreter and of the guard is loaded, and nothing of any program. The server forks a guard into the namespaces or
the uid of one run. The guard makes the place of the run, waits for one message with a stream of the service, reads the
job from it, and forks the program; meanwhile the server forks the guard of the next run, which makes its place and
waits. A Python program leaves this module: its interpreter is up already, and runs ``main.py``.

Nothing leads back from a run to the server: what a run changes is its own copy of the memory, its descriptors of the
server are closed before the program begins, and the server is not in its process namespace, or has another uid.
What runs of one server do have in common is where things lie in memory and how strings hash, chosen at its start.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from services.sandbox.guard import kernel, landlock, main, namespaces, seccomp
from services.sandbox.guard.job import DONE, JOINED, KILL_NAMESPACE, KILL_UID, READY, Orders
from services.sandbox.guard.process import MACHINE, IsProgram

MESSAGE_BYTES = 65536
MOST_GROUPS = 8
_LEFT: "list[IsProgram]" = []
"""Keeps the frames that a program has left: taking them apart would cost more than it frees."""


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
    message, groups, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MOST_GROUPS)
    try:
        if message:
            orders = Orders.from_wire(json.loads(message))
            _join(groups)
            if orders.confinement.kill_scope == KILL_NAMESPACE:
                namespaces.prepare()
            control.send(JOINED)
            _forget(set(paths), known)
            _run_all(control, orders)
    except IsProgram as program:
        _LEFT.append(program)
        return program.is_session
    os._exit(0)


def _join(groups: "list[int]") -> None:
    """Join control groups, before anything is forked: all runs are born in them.

    For any other than a thread that moves itself the kernel waits until every fork on the machine is over, and lets
    none begin meanwhile.

    Args:
        groups: files that were opened by the service, whose right to them counts.

    Raises:
        OSError: the kernel refused.
    """
    for group in groups:
        os.write(group, b"0")
        os.close(group)


def _run_all(control: socket.socket, orders: Orders) -> None:
    """Fork the guards of all runs, each while the run before goes on; returns when the service is gone.

    A program can keep the next guard from being forked or from making its place, by using up what both share. Such a
    guard is forked again when the program is gone, so that nothing of it is left to the next one.

    Raises:
        IsProgram: in the child that is the program.
    """
    guard = _fork_guard(control, orders, is_ahead=False)
    while True:
        is_asked = bool(os.read(guard.asked, 1))
        os.close(guard.asked)
        following = _fork_ahead(control, orders) if is_asked else None
        _, status = os.waitpid(guard.pid, 0)
        if is_asked:
            try:
                control.send(DONE)
            except ConnectionError:
                return
        elif status == 0 or not guard.is_ahead:
            return
        guard = following or _fork_guard(control, orders, is_ahead=False)


class _Guard(NamedTuple):
    """A guard that waits for its run, or attends to it.

    Attributes:
        asked: a descriptor on which it says that it has been asked; it ends with the guard.
        is_ahead: whether another run went on when it was forked.
    """

    pid: int
    asked: int
    is_ahead: bool


def _fork_ahead(control: socket.socket, orders: Orders) -> "_Guard | None":
    try:
        return _fork_guard(control, orders, is_ahead=True)
    except OSError:
        return None


def _fork_guard(control: socket.socket, orders: Orders, *, is_ahead: bool) -> _Guard:
    """Fork a guard.

    Raises:
        OSError: the kernel refused.
        IsProgram: in the child that is the program.
    """
    asked, child_asked = os.pipe()
    try:
        pid = namespaces.fork() if orders.confinement.kill_scope == KILL_NAMESPACE else os.fork()
    except OSError:
        os.close(asked)
        os.close(child_asked)
        raise
    if pid == 0:
        os.close(asked)
        _guard(control, orders, child_asked, is_ahead=is_ahead)
    os.close(child_asked)
    return _Guard(pid, asked, is_ahead)


def _guard(control: socket.socket, orders: Orders, asked: int, *, is_ahead: bool) -> NoReturn:
    """Be the guard of one run, then end.

    Raises:
        IsProgram: in the child that is the program.
    """
    try:
        place: int | Exception = 0
        # Where a run is ended by its uid, a guard that had the uid already would be ended with the run before.
        has_place = orders.confinement.kill_scope != KILL_UID
        if has_place:
            place = _place(orders)
            if is_ahead and isinstance(place, Exception):
                os._exit(1)
        message, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)  # the service is gone
        control.close()
        os.write(asked, b"a")
        os.close(asked)
        caller = int.from_bytes(ancillary[0][2], sys.byteorder)
        main.attend(caller, place if has_place else _place(orders), orders)
    except IsProgram:
        raise
    except BaseException:  # this is a copy of the server and must not go on as one
        os._exit(1)
    os._exit(0)


def _place(orders: Orders) -> "int | Exception":
    try:
        return main.furnish(orders)
    except Exception as error:  # the service learns it when it asks
        return error


def _warm_up() -> None:
    """Do once what would be the same for each run."""
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for denies_metadata in (False, True):
        if MACHINE in seccomp.ARCHITECTURES:
            seccomp.filter_for(MACHINE, denies_metadata)
    landlock.version()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # should a guard be killed, its programs are found below the server
    gc.collect()
    gc.freeze()


def _forget(paths: "set[str]", modules_before: "set[str]") -> None:
    """Leave the interpreter as if the guard had never been imported: here and not in each program."""
    ours = {name: module for name, module in sys.modules.items() if name not in modules_before}
    # Held for ever: taking the modules apart would cost more than the program's start, and change shared pages.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ours))
    for name in ours:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in paths]
