"""A process that runs somebody's code cannot look into the memory of the service that started it.

Landlock keeps a process from tracing any that is outside its own domain, which reading ``/proc/PID/mem`` is, root's
processes included; newer kernels also keep it from sending them signals. Environments are still shown: services take
their secrets out of theirs (``shared/children/secret_variables.py``).

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
REFER = 1 << 13
"""Moving files between folders: denied in every domain, unless it is handled and granted."""
REFER_VERSION, SIGNAL_VERSION = 2, 6
SIGNALS = 1 << 1
PR_SET_NO_NEW_PRIVS = 38


def confine() -> bool:
    """Enter a domain of its own, in which files and networks are as before; False where the kernel offers none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        version = library.syscall(
            ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG)
        )
    except OSError:
        return False
    if version < REFER_VERSION:
        return False
    attributes = struct.pack("=QQQ", REFER, 0, SIGNALS)[: 24 if version >= SIGNAL_VERSION else 8]
    ruleset = library.syscall(
        ctypes.c_long(CREATE_RULESET), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", REFER, root)
        library.syscall(
            ctypes.c_long(ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint32(0)
        )
        library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return int(library.syscall(ctypes.c_long(RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0))) == 0
    finally:
        os.close(root)
        os.close(ruleset)
