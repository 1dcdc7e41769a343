"""The namespaces of one run, made by the guard before the program exists: nothing in them was there before.

The fork server lives in a sandbox that bwrap made, with CAP_SYS_ADMIN in bwrap's user namespace alone. Each run gets
namespaces of its own below it: processes, mounts, network, IPC, host name, and last a user namespace in which the
capability means nothing any more.
"""

import os
import signal
from collections.abc import Callable

from services.sandbox.guard import kernel
from services.sandbox.limits import MEBIBYTE, Limits

NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
OF_A_RUN = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_NETWORK

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
DETACH = 2

NOBODY = 65534
WORK = "/work"
CODE = "/guard"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
SHARED_MEMORY_BYTES = 16 * MEBIBYTE


def prepare() -> None:
    """Change the fork server's root to what every run's copy of it begins with, once all of the guard is in memory.

    Raises:
        OSError: the kernel refused.
    """
    kernel.mount("", "/", RECURSIVE | PRIVATE)  # what a run mounts must not appear here
    for seen in (CODE, "/dev/pts"):  # terminals are counted by the whole machine
        kernel.unmount(seen, DETACH)


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


def furnish(limits: Limits) -> int:
    """Make what a program finds, in namespaces of its own, and give up every privilege.

    It finds an empty working directory, empty shared memory, and its own processes.

    Returns:
        A descriptor through which this process sets how soon the kernel ends it when memory runs out.

    Raises:
        OSError: the kernel refused.
    """
    kernel.unshare(OF_A_RUN)
    inodes = 2 * limits.files + 64  # beyond what the guard reports by name
    memory = f"nr_inodes={inodes},mode=0700"
    # A little more than the quota that the guard reports by name.
    kernel.mount("tmpfs", WORK, NO_SETUID | NO_DEVICES, f"size={limits.disk_bytes + MEBIBYTE},{memory}")
    shared = min(limits.disk_bytes, SHARED_MEMORY_BYTES)
    kernel.mount("tmpfs", SHARED_MEMORY, NO_SETUID | NO_DEVICES, f"size={shared},{memory}")
    own = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        hardness = os.open("oom_score_adj", os.O_RDWR | os.O_CLOEXEC, dir_fd=own)
        _mount_processes()
        os.chdir(WORK)
        kernel.unshare(NEW_USER)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} 0 1"), ("gid_map", f"{NOBODY} 0 1")):
            _write(own, file, text)
    finally:
        os.close(own)
    kernel.drop_capabilities()
    return hardness


def _mount_processes() -> None:
    flags = READ_ONLY | NO_SETUID | NO_DEVICES | NO_EXECUTION
    try:
        kernel.mount("proc", "/proc", flags, "subset=pid")
    except OSError:  # before Linux 5.8
        kernel.mount("proc", "/proc", flags)


def _write(directory: int, name: str, text: str) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
