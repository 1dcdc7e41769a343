"""What a process does between its fork and the program that it becomes.

It makes the place of its run ahead of need, drops every privilege, waits for one order, and confines
itself.

A command that is the fork server's own command line (``python -s -B main.py``) is not executed: the process is that
interpreter already, stopped just before it opens ``main.py``, and continues.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from flotilla.services.sandbox.guard import agent, kernel, landlock, namespaces, seccomp
from flotilla.services.sandbox.guard.job import KILL_DESCENDANTS, KILL_UID, Orders, Phase, made
from flotilla.services.sandbox.limits import Limits, apply_rlimits

MADE, FAILED = b"m", b"!"
"""Its own messages besides its agent's: the place is made, something failed (and why)."""
MESSAGE_BYTES = 65536
MOST_STREAMS = 8
OWN_PROCESSES = 5
"""The isolation's own processes, which count for the uid too."""
NICENESS = 10
MOST_DESCRIPTORS = 1 << 20
MACHINE = os.uname().machine
NUM_STANDARD = 3
NOT_STARTED_CODE = 127
_DECODER = json.JSONDecoder()


class IsProgram(BaseException):
    """Raised in the forked process that is to continue as the program: it leaves all frames of the guard.

    Args:
        is_session: whether the program is the interpreter of a session.
    """

    def __init__(self, is_session: bool) -> None:
        self.is_session = is_session


def become(channel: socket.socket, orders: Orders, prepared: "namespaces.Prepared | None") -> NoReturn:
    """Make the place of a run, and become its program, or tend its commands, as the guard says.

    Args:
        channel: of the guard; the program's start closes it.
        orders: those of the fork server.
        prepared: what the server has made for all runs, where they have namespaces.

    Raises:
        IsProgram: the command is this very interpreter.
    """
    try:
        hardness = _make_place(channel, orders, prepared)
        while True:
            message, streams, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MOST_STREAMS)
            if not message:
                os._exit(0)  # the guard is gone, or wants no program
            described, limits, is_session, is_tended = _DECODER.raw_decode(message.decode())[0]
            described["argv"] = tuple(described["argv"])
            phase: Phase = made(Phase, described)
            bounds = orders.limits if limits is None else made(Limits, limits)
            if not is_tended or (pid := os.fork()) == 0:
                _begin(phase, bounds, orders, streams, channel, hardness, is_session=is_session)
            for stream in streams:
                os.close(stream)
            agent.tend(channel, pid, orders.confinement)
    except IsProgram:
        raise
    except BaseException as error:  # whatever it is, the guard reports it and this copy of the server must end
        with suppress(OSError):
            channel.send(FAILED + f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(NOT_STARTED_CODE)


def _make_place(channel: socket.socket, orders: Orders, prepared: "namespaces.Prepared | None") -> int:
    """Make what the program finds and notify the guard.

    Returns:
        A descriptor through which this process sets how soon the kernel ends it when memory runs out.

    Raises:
        OSError: the kernel refused.
    """
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise this process's own files in /proc are root's
    if prepared is None:
        hardness = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        channel.send(MADE)
        return hardness
    hardness = namespaces.furnish(orders.limits, prepared)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no other process may read this one before it is the program
    directory = os.open(orders.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Taking mounts apart waits for all processors: that is not to delay the program's end.
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    socket.send_fds(channel, [MADE], [directory, mounts])
    os.close(directory)
    os.close(mounts)
    return hardness


def _begin(
    phase: Phase,
    limits: Limits,
    orders: Orders,
    streams: "Sequence[int]",
    channel: socket.socket,
    hardness: int,
    *,
    is_session: bool,
) -> NoReturn:
    """Turn this process into the command.

    Raises:
        IsProgram: the command is this very interpreter.
        OSError: the kernel refused.
    """
    os.write(hardness, b"1000")  # if memory runs out the program goes, not the guard
    confinement = orders.confinement
    if confinement.kill_scope == KILL_UID:
        assert confinement.uid is not None
        take_uid(confinement.uid)
    os.setsid()
    *streams, speaking = [_at_least(len(streams) + 1, number) for number in (*streams, channel.fileno())]
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target, inheritable=target < NUM_STANDARD)
    speaking = os.dup2(speaking, len(streams), inheritable=False)
    channel.detach()
    told = socket.socket(fileno=speaking)
    os.closerange(speaking + 1, MOST_DESCRIPTORS)  # nothing of the guard or the fork server stays open
    try:
        os.chdir(orders.directory)
        os.umask(0o077)
        os.nice(NICENESS)  # where no control group weighs it, it is at least less than what the fleet does
        others = len(_processes_of_uid()) if confinement.kill_scope == KILL_DESCENDANTS else OWN_PROCESSES
        _confine(phase, limits, orders, processes=limits.processes + others)
        if list(phase.argv) == getattr(sys, "orig_argv", None):
            told.close()
            raise IsProgram(is_session)
        # Python ignores these two, and what is ignored stays so through exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execve(phase.argv[0], list(phase.argv), dict(orders.environment))  # noqa: S606  no shell is the point
    except IsProgram:
        raise
    except BaseException as error:
        told.send(FAILED + f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(NOT_STARTED_CODE)


def take_uid(uid: int) -> None:
    """Become a user for ever.

    Raises:
        OSError: the kernel refused.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _at_least(bound: int, descriptor: int) -> int:
    """Make a descriptor that none of the first ones is put on; those in between are closed with the rest."""
    while descriptor < bound:
        descriptor = os.dup(descriptor)
    return descriptor


def _confine(phase: Phase, limits: Limits, orders: Orders, *, processes: int) -> None:
    confinement = orders.confinement
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the guard watches through its files in /proc, which would be root's
    apply_rlimits(
        limits,
        cpu_seconds=phase.timeout_seconds + 1,
        limits_address_space=phase.limits_address_space,
        processes=processes,
    )
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if confinement.readable is not None:
        landlock.restrict(confinement.readable, confinement.writable)
    if confinement.has_seccomp:
        denies_metadata = confinement.denies_metadata and not phase.is_tool
        seccomp.filter_for(MACHINE, denies_metadata).install()


def _processes_of_uid() -> "list[int]":
    """List the threads of this uid: where it is shared, RLIMIT_NPROC counts them all."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        with suppress(OSError):
            if name.isdigit() and os.lstat(f"/proc/{name}").st_uid == os.getuid():
                found += [int(thread) for thread in os.listdir(f"/proc/{name}/task")]  # noqa: PTH208
    return found
