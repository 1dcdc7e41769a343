"""A process of a run that starts commands for the guard, and signals and reaps what they leave; it is no program.

A run needs one where it has several commands, or its command is not the interpreter that waits already, or lives on
between cells.
"""

import os
import select
import signal
import socket
import struct
from contextlib import suppress

from flotilla.services.sandbox.guard import kernel
from flotilla.services.sandbox.guard.job import ENDED, KILL_DESCENDANTS, KILL_NAMESPACE, KILL_UID, Confinement
from flotilla.services.sandbox.guard.watch import POLL_SECONDS, descendants

SIGNALLED, REAPED = b"s", b"r"
"""What it says besides ``ENDED``, of its command: a signal was sent, orphans were reaped (and the processor time of
all)."""
OF_ALL = 1
"""Second byte of an order to signal all processes, and not the command alone; the first one is the signal's number, or
0 to reap orphans."""
SECOND = 2
"""Number, in the process namespace of a run, of the process that makes its place."""


def tend(channel: socket.socket, main: int, confinement: Confinement) -> None:
    """Wait for a command's end and for orders meanwhile; all that the command has left is ended with it.

    Args:
        channel: of the guard.
        main: the command.
        confinement: how it is ended.
    """
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    ending = open_pidfd(main)
    if ending is not None:
        poll.register(ending, select.POLLIN)
    while True:
        events = poll.poll(None if ending is not None else 1000 * POLL_SECONDS)
        if any(descriptor != ending for descriptor, _ in events):
            _obey(channel, main, confinement)
        if os.waitid(os.P_PID, main, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    if ending is not None:
        os.close(ending)
    _signal_all(confinement, signal.SIGKILL)
    _, status = os.waitpid(main, 0)
    channel.send(ENDED + struct.pack("=i", status))


def _obey(channel: socket.socket, main: int, confinement: Confinement) -> None:
    order = channel.recv(2)
    if not order:
        _signal_all(confinement, signal.SIGKILL)
        os._exit(0)  # the guard is gone
    if order[0] == 0:
        _reap_orphans(main)
        times = os.times()
        channel.send(REAPED + struct.pack("=d", times.children_user + times.children_system))
        return
    if order[1] == OF_ALL:
        _signal_all(confinement, order[0])
    else:
        os.kill(main, order[0])
    channel.send(SIGNALLED)


def check_kill_scope(confinement: Confinement) -> None:
    """Make sure that a signal to everything reaches only the program, before one is ever sent.

    Raises:
        PermissionError: it would reach further.
    """
    if confinement.kill_scope == KILL_NAMESPACE and os.getpid() != SECOND:
        raise PermissionError("this is not the second process of a process namespace of its own")
    if confinement.kill_scope == KILL_UID and (os.getuid() != confinement.uid or os.getuid() == 0):
        raise PermissionError(f"the guard has uid {os.getuid()}, not its own uid {confinement.uid}")


def _signal_all(confinement: Confinement, number: int) -> None:
    """Signal all processes of the run but this one; where they have a uid of their own the guard does it."""
    if confinement.kill_scope == KILL_DESCENDANTS:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    elif confinement.kill_scope == KILL_NAMESPACE:
        check_kill_scope(confinement)
        # To all of the namespace but its first one and this one. The kernel does it in one go, which no fork outruns.
        with suppress(ProcessLookupError):
            os.kill(-1, number)


def _reap_orphans(main: int) -> None:
    """Reap what has ended but for the command."""
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if found.si_pid == main:
            return
        os.waitpid(found.si_pid, 0)


def open_pidfd(pid: int) -> "int | None":
    """Open what can be read once a process has ended; None on a kernel that has no such thing."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
