"""Landlock: which paths a process and its descendants may touch, without any privilege.

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from functools import cache

from flotilla.services.sandbox.guard.kernel import system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST_VERSION_RIGHTS = (1 << 13) - 1
READ = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NETWORK_RIGHTS = 0b11  # bind and connect of TCP
SCOPES = 0b11  # abstract unix sockets and signals

NETWORK_VERSION = 4
SCOPE_VERSION = 6
"""From this version on a program cannot send signals to processes outside its own domain."""


_RULE, _RIGHTS = struct.Struct("=Qi"), struct.Struct("=Q")


@cache
def version() -> int:
    """Ask the kernel for its Landlock version; 0 if it has none or it is switched off."""
    try:
        return system_call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    except OSError:
        return 0


def handled_rights(kernel_version: int) -> int:
    """List the file rights that a kernel knows, as a bit mask: all of them are denied unless a rule grants them."""
    rights = FIRST_VERSION_RIGHTS
    rights |= REFER if kernel_version >= 2 else 0
    rights |= TRUNCATE if kernel_version >= 3 else 0
    rights |= IOCTL_DEV if kernel_version >= 5 else 0
    return rights


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Confine this process and all that it becomes to these paths, without TCP and without signals to others.

    Args:
        readable: files and directories to read and execute; one that does not exist is skipped.
        writable: files and directories to use without restriction.

    Raises:
        OSError: the kernel has no Landlock, or refused.
    """
    kernel_version = version()
    if kernel_version < 1:
        raise OSError("this kernel has no Landlock")
    handled = handled_rights(kernel_version)
    attributes = _RIGHTS.pack(handled)
    if kernel_version >= NETWORK_VERSION:
        attributes += _RIGHTS.pack(NETWORK_RIGHTS)
    if kernel_version >= SCOPE_VERSION:
        attributes += _RIGHTS.pack(SCOPES)
    ruleset = system_call(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        for path in readable:
            _allow(ruleset, path, READ & handled)
        for path in writable:
            _allow(ruleset, path, handled)
        system_call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = _RULE.pack(rights if is_directory else rights & FILE_RIGHTS, descriptor)
        system_call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)
