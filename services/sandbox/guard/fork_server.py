"""A warm interpreter that forks into a fresh sandbox per run, and never learns what runs there.

It is ``python -s -B main.py``, held up where the interpreter imports ``sitecustomize``, which is ours: everything of
the interpreter and of the guard is loaded, and nothing of any program. The server forks the guard of its slot once.
For each run it forks a process into the namespaces of that run, which makes its place, waits for the guard's word, and
becomes the program; with namespaces it does so while the run before continues. A Python program leaves this module: its
interpreter is up already, and runs ``main.py``.

Nothing leads back from a run to the server: what a run changes is its own copy of the memory, its descriptors of the
server are closed before the program begins, and the server is not in its process namespace, or has another uid. Jobs,
outputs and files are the guard's, which forks nothing.
What runs of one server do have in common is where things lie in memory and how strings hash, chosen at its start.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

from flotilla.services.sandbox.guard import kernel, landlock, main, namespaces, program, seccomp
from flotilla.services.sandbox.guard.job import DONE, ENDED, FORKING, GONE, JOINED, KILL_NAMESPACE, READY, Orders
from flotilla.services.sandbox.guard.program import MACHINE, IsProgram
from flotilla.services.sandbox.guard.watch import descendants, read

MESSAGE_BYTES = 65536
MOST_GROUPS = 8
_LEFT: "list[IsProgram]" = []
"""Keeps the frames that a program has left: taking them apart would cost more than it frees."""


def serve(paths: Iterable[str], modules_before: Iterable[str]) -> bool:
    """Fork the guard, and processes for its runs until it ends; returns only in a child that is the program.

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
            prepared = namespaces.prepare() if orders.confinement.kill_scope == KILL_NAMESPACE else None
            control.send(JOINED)
            _forget(set(paths), known)
            _Server(control, orders, prepared).serve()
    except IsProgram as left:
        _LEFT.append(left)
        return left.is_session
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


class _Server:
    """Makes a place for a run when the guard asks, and notifies it when all of the run has ended; one run at a time.

    From a fork to the run's end it only waits: the process of a run writes to most of what it uses, and while that is
    shared each write of the server to the same page would be one more copy.
    """

    def __init__(self, control: socket.socket, orders: Orders, prepared: "namespaces.Prepared | None") -> None:
        self._control = control
        self._orders = orders
        self._prepared = prepared
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guard = os.fork()
        if self._guard == 0:
            self._link.close()
            main.guard(control, theirs, orders)
        theirs.close()

    def serve(self) -> None:
        """Serve until the guard has ended; then end what it leaves.

        Raises:
            IsProgram: in the child that is the program.
        """
        while self._link.recv(1) and self._run():
            pass
        self._end_all(but=())
        with suppress(ConnectionError):
            self._control.send(DONE)  # a program may have ended the guard: that is its failure, not the server's

    def _run(self) -> bool:
        """Fork the processes of a run, and wait until all of it has ended; False if the guard ends first.

        Raises:
            IsProgram: in the child that is the program.
        """
        stream, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, child_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def hand_over() -> None:
            with stream, channel:
                socket.send_fds(self._link, [FORKING], [stream.fileno(), channel.fileno()])

        first = 0
        try:
            if self._prepared is not None:
                first, pid = namespaces.fork(self._prepared.pids, hand_over)
            else:
                hand_over()
                pid = os.fork()
        except OSError as error:
            for ours in (stream, channel, told, child_channel):
                ours.close()
            self._link.send(f"{type(error).__name__}: {error}".encode())
            return True
        if pid == 0:
            program.become(child_channel, self._orders, self._prepared)
        child_channel.close()
        self._link.send(b"%d %d" % (first or os.getpid(), pid))
        ended, status = 0, 0
        while ended != pid:
            ended, status = os.waitpid(-1, 0)  # orphans too
            if ended == self._guard:
                return False
        self._end(first, told, struct.pack("=i", status))
        return True

    def _end(self, first: int, stream: socket.socket, status: bytes) -> None:
        """End the rest of a run whose program has ended, and notify the guard.

        Args:
            first: process of its process namespace; 0 if it has none.
            stream: where the guard learns of it.
            status: of the program.
        """
        with stream, suppress(ConnectionError):
            if first:
                with suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(first, 0)
            else:
                stream.send(ENDED + status)  # the guard ends what has a uid of its own
                self._end_all(but=(self._guard,))
            stream.send(GONE + status)

    @staticmethod
    def _end_all(but: "tuple[int, ...]") -> None:
        """End all processes below this one but some; orphans are this one's children."""
        while others := [pid for pid in _children() if pid not in but]:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for _ in others:  # in whichever order: the first one of a namespace ends when all others are reaped
                os.waitpid(-1, 0)


def _children() -> "list[int]":
    """List this process's children."""
    own = os.getpid()
    try:
        return [int(pid) for pid in read(f"/proc/{own}/task/{own}/children").split()]
    except OSError:  # a kernel without these lists
        return [pid for pid, status in descendants(own).items() if status.parent == own]


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
