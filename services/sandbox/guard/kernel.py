"""Calls of the C library that Python 3.11 has no function for. No call lets another thread run: the guard has none."""

import ctypes
import os
import signal
from itertools import repeat

PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_DUMPABLE = 4
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522

SHARING_MEMORY, SHARING_FILES = 0x100, 0x400
SIG_BLOCK, SIG_SETMASK = 0, 2
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 131_072

_LIBRARY = ctypes.PyDLL(None, use_errno=True)
for _name in ("capset", "mount", "prctl", "setns", "syscall", "unshare"):
    getattr(_LIBRARY, _name)  # looked up now, and not in each fork
_CAPABILITIES_OF_THIS = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
_NOTHING = ctypes.c_ulong(0)
_ALL_CAPABILITIES = range(LAST_CAPABILITY + 1)
_ALL_SIGNALS = ctypes.create_string_buffer(b"\xff" * 128, 128)
_SIGNALS_BEFORE = ctypes.create_string_buffer(128)
_PAUSE = ctypes.cast(_LIBRARY.pause, ctypes.c_void_p)
_STACK = ctypes.create_string_buffer(16384)
"""Of processes that wait: several use the same few words, and alike."""
_STACK_TOP = ctypes.c_void_p((ctypes.addressof(_STACK) + len(_STACK)) & ~15)


def system_call(number: int, *arguments: object) -> int:
    """Call the kernel by number.

    Raises:
        OSError: it refused.
    """
    result = int(_LIBRARY.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _error(f"system call {number}")
    return result


def prctl(option: int, value: int, address: int = 0) -> None:
    """Change a property of this process.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBRARY.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(address), _NOTHING, _NOTHING) != 0:
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
    """Drop every capability for ever, also those that executing a file could bring back.

    Raises:
        OSError: the kernel refused.
    """
    # Until the first number that the kernel does not know. A loop Python would rewrite to be fast, in each fork again.
    any(map(_LIBRARY.prctl, repeat(PR_CAPBSET_DROP), _ALL_CAPABILITIES, *[repeat(_NOTHING)] * 3))
    set_no_capabilities()


def set_no_capabilities() -> None:
    """Drop every capability; executing a file could bring some back.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBRARY.capset(_CAPABILITIES_OF_THIS, _NO_CAPABILITIES) != 0:
        raise _error("capset")


def clone_waiting() -> int:
    """Start a process that shares this one's memory and descriptors and only waits, deaf to what does not kill it.

    It ignores the end of its children, which the kernel therefore reaps at once. Meanwhile this process does so too.

    Returns:
        Its number.

    Raises:
        OSError: the kernel refused.
    """
    _LIBRARY.sigprocmask(SIG_BLOCK, _ALL_SIGNALS, _SIGNALS_BEFORE)  # handlers would run in our memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pid = int(_LIBRARY.clone(_PAUSE, _STACK_TOP, SHARING_MEMORY | SHARING_FILES | signal.SIGCHLD, None))
    number = ctypes.get_errno()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _LIBRARY.sigprocmask(SIG_SETMASK, _SIGNALS_BEFORE, None)
    if pid < 0:
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def set_namespace(descriptor: int, kind: int) -> None:
    """Move this process to another namespace; of processes those that it forks.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBRARY.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)) != 0:
        raise _error("setns")


def give_memory_back() -> None:
    """Have the C library give large pieces of memory back as soon as they are free, and not keep them for the next."""
    if hasattr(_LIBRARY, "mallopt"):  # the GNU one's, which otherwise learns to keep them
        _LIBRARY.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
