"""The namespaces of one run, made by its own process before it is the program: nothing in them was there before.

The fork server lives in a sandbox that bwrap made, with CAP_SYS_ADMIN in bwrap's user namespace alone. Each run gets
namespaces of its own below it: processes, mounts, IPC, host name. Two more are made once per server, for nothing can be
left in them, and to make and remove one of the network takes as long as all others together:

- Network: there is no interface but a loopback that is down, and no process or socket of anybody else. Only who has
  rights in bwrap's user namespace could change that; what sockets a program has are gone with it.
- Users: a process in it has no rights anywhere, not even in it.
"""

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from flotilla.services.sandbox.guard import kernel
from flotilla.services.sandbox.limits import MEBIBYTE, Limits

NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
OF_A_RUN = NEW_MOUNTS | NEW_UTS | NEW_IPC

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
DETACH = 2

NOBODY = 65534
WORK = "/work"
CODE = "/guard"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
SHARED_MEMORY_BYTES = 16 * MEBIBYTE


@dataclass(frozen=True)
class Prepared:
    """What a fork server makes once, for the processes of runs to enter: descriptors of namespaces.

    Attributes:
        pids: the server's own, to come back to.
        network, users: of all runs, one after the other.
    """

    pids: int
    network: int
    users: int


def prepare() -> Prepared:
    """Change the fork server's root to what every run's copy of it begins with, once all of the guard is in memory.

    Raises:
        OSError: the kernel refused.
    """
    kernel.mount("", "/", RECURSIVE | PRIVATE)  # what a run mounts must not appear here
    for seen in (CODE, "/dev/pts"):  # terminals are counted by the whole machine
        kernel.unmount(seen, DETACH)
    own_network = _namespace("net")
    kernel.unshare(NEW_NETWORK)
    network = _namespace("net")
    kernel.set_namespace(own_network, NEW_NETWORK)  # no socket of the server or the guard is among the programs'
    os.close(own_network)
    return Prepared(_namespace("pid"), network, _make_users())


def _namespace(kind: str) -> int:
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _make_users() -> int:
    """Make a user namespace in which the server's uid is ``nobody``; its process ends at once, but it stays."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if (pid := os.fork()) == 0:
            try:
                kernel.unshare(NEW_USER)
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise this process's own files in /proc are root's
                for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} 0 1"), ("gid_map", f"{NOBODY} 0 1")):
                    _write(f"/proc/self/{file}", text)
                socket.send_fds(theirs, [b"u"], [_namespace("user")])
            finally:
                os._exit(0)
        theirs.close()
        _, found, _, _ = socket.recv_fds(ours, 1, 1)
        os.waitpid(pid, 0)
    if not found:
        raise OSError("no user namespace for programs could be made")
    os.set_inheritable(found[0], False)
    return found[0]


def fork(own: int, first_made: "Callable[[], object]") -> "tuple[int, int]":
    """Fork into the process namespace of a run.

    The first process there only waits: with it the kernel ends all others, and those that have no other parent are
    reaped at once. The second one is the copy of this one, and moves to the other namespaces itself: to make them may
    take long on a busy machine.

    Args:
        own: this process's own process namespace.
        first_made: is called between both; until then no child may end whose status is wanted.

    Returns:
        The numbers of both, that of the second as ``os.fork`` does.

    Raises:
        OSError: the kernel refused.
    """
    first = 0
    try:
        kernel.unshare(NEW_PIDS)
        first = kernel.clone_waiting()
        first_made()
        second = os.fork()
    except OSError:
        if first:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
        kernel.set_namespace(own, NEW_PIDS)
        raise
    if second:
        kernel.set_namespace(own, NEW_PIDS)
    return first, second


def furnish(limits: Limits, prepared: Prepared) -> int:
    """Make what a program finds, in namespaces of its own, and drop every privilege.

    It finds an empty working directory, empty shared memory, and its own processes.

    Returns:
        A descriptor through which this process sets how soon the kernel ends it when memory runs out.

    Raises:
        OSError: the kernel refused.
    """
    kernel.set_namespace(prepared.network, NEW_NETWORK)
    kernel.unshare(OF_A_RUN)
    inodes = 2 * limits.files + 64  # beyond what the guard reports by name
    memory = f"nr_inodes={inodes},mode=0700"
    # A little more than the quota that the guard reports by name.
    kernel.mount("tmpfs", WORK, NO_SETUID | NO_DEVICES, f"size={limits.disk_bytes + MEBIBYTE},{memory}")
    shared = min(limits.disk_bytes, SHARED_MEMORY_BYTES)
    kernel.mount("tmpfs", SHARED_MEMORY, NO_SETUID | NO_DEVICES, f"size={shared},{memory}")
    hardness = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    _mount_processes()
    os.chdir(WORK)
    kernel.set_namespace(prepared.users, NEW_USER)
    kernel.drop_capabilities()
    return hardness


def _mount_processes() -> None:
    flags = READ_ONLY | NO_SETUID | NO_DEVICES | NO_EXECUTION
    try:
        kernel.mount("proc", "/proc", flags, "subset=pid")
    except OSError:  # before Linux 5.8
        kernel.mount("proc", "/proc", flags)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
