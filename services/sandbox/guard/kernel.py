"""Calls of the C library that Python 3.11 has no function for. No call lets another thread run: the guard has none."""

import ctypes
import os

PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522

_LIBRARY = ctypes.PyDLL(None, use_errno=True)


def system_call(number: int, *arguments: object) -> int:
    """Call the kernel by number.

    Raises:
        OSError: it refused.
    """
    result = int(_LIBRARY.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _error(f"system call {number}")
    return result


def prctl(option: int, *arguments: int) -> None:
    """Change a property of this process.

    Raises:
        OSError: the kernel refused.
    """
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _LIBRARY.prctl(ctypes.c_int(option), *padded) != 0:
        raise _error(f"prctl {option}")


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a file system of a kind, or change a mount where the kind is empty.

    Raises:
        OSError: the kernel refused.
    """
    source = kind.encode() or None
    if _LIBRARY.mount(source, target.encode(), source, ctypes.c_ulong(flags), options.encode() or None) != 0:
        raise _error(f"mounting {kind or 'anew'} at {target}")


def unmount(target: str, flags: int) -> None:
    """Take a mount away.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBRARY.umount2(target.encode(), ctypes.c_int(flags)) != 0:
        raise _error(f"unmounting {target}")


def unshare(flags: int) -> None:
    """Give this process namespaces of its own.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBRARY.unshare(ctypes.c_int(flags)) != 0:
        raise _error(f"unshare {flags:#x}")


def drop_capabilities() -> None:
    """Give up every capability for ever, also those that executing a file could bring back.

    Raises:
        OSError: the kernel refused.
    """
    call, nothing = _LIBRARY.prctl, ctypes.c_ulong(0)
    for capability in range(LAST_CAPABILITY + 1):
        if call(PR_CAPBSET_DROP, capability, nothing, nothing, nothing):
            break  # the first number that the kernel does not know
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    if _LIBRARY.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise _error("capset")


def fork(clone_number: int, namespaces: int) -> int:
    """Fork into new namespaces.

    Returns:
        As ``os.fork``: 0 in the child.

    Raises:
        OSError: the kernel refused.
    """
    child_signal = 17  # SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_LIBRARY.syscall(ctypes.c_long(clone_number), ctypes.c_ulong(namespaces | child_signal), 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone into namespaces {namespaces:#x}: {os.strerror(number)}")
    return pid


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
