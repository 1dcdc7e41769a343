"""A system call filter, written by hand as classic BPF and installed through ``prctl``.

It denies what a program that computes has no need of and that reaches out of the sandbox or widens the kernel's
attack surface: sockets, namespaces and mounts, tracing, io_uring (which could open sockets past this filter), keys,
BPF, shared memory that no limit counts. Denied calls fail with EPERM: a program sees an exception and not a death.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst; numbers from asm/unistd_64.h and asm-generic/unistd.h.
"""

import ctypes
import errno
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from flotilla.services.sandbox.guard import kernel

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "personality": (135, 92),
    "vhangup": (153, 58), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # A pair of sockets needs none of these; with them it reaches sockets of the host, holds files that no process has
    # open, or more memory than is counted.
    "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "setsockopt": (54, 208),
    # Locks and watches on files that all programs read: one program would learn of another.
    "flock": (73, 32), "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip

# Changing a file's mode, owner, times or attributes: Landlock does not govern these, only ownership does.
METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
}  # fmt: skip

CLONE = (56, 220)
CLONE3 = (435, 435)
PRLIMIT64 = (302, 261)
SOCKETPAIR = (53, 199)
FCNTL = (72, 25)
IOCTL = (16, 29)
PRCTL = (157, 167)

AF_UNIX = 1
NOT_A_STREAM = 0b1110
"""Bits of a socket's type of which SOCK_STREAM has none: other types can be sent to any address."""
DENIED_FCNTL = {"F_GETLK": 5, "F_OFD_GETLK": 36, "F_SETLEASE": 1024, "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031}
"""What tells of others' locks and accesses, or makes a pipe hold more than is counted."""
TIOCSTI = 0x5412
CLONE_NEW_ANY = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""

CLONE_FILES, CLONE_THREAD = 0x400, 0x10000

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
MOST_SKIPPED = 255
"""What a conditional jump can skip."""

OFFSET_NUMBER, OFFSET_ARCHITECTURE, OFFSET_ARGUMENTS = 0, 4, 16

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
DENY = 0x00050000 | errno.EPERM
NO_SUCH_CALL = 0x00050000 | errno.ENOSYS

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2


class Instruction(NamedTuple):
    """One classic BPF instruction."""

    code: int
    jump_true: int
    jump_false: int
    value: int


def build_filter(machine: str, *, denies_metadata: bool) -> list[Instruction]:
    """Make the filter for an architecture.

    Args:
        machine: as ``os.uname()`` calls it.
        denies_metadata: also deny changes of a file's mode, owner, times and attributes, where the program runs under
            the uid of other files.

    Raises:
        ValueError: there is no table for this architecture.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no system call table for {machine}; there is one for {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    table = DENIED | METADATA if denies_metadata else DENIED
    denied = sorted(number for numbers in table.values() if (number := numbers[column]) is not None)
    program = [
        Instruction(LOAD, 0, 0, OFFSET_ARCHITECTURE),
        Instruction(JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        Instruction(RETURN, 0, 0, KILL_PROCESS),
        Instruction(LOAD, 0, 0, OFFSET_NUMBER),
    ]
    program += _deny(denied, from_number=X32_BIT if machine == "x86_64" else None)
    # clone3 hides its flags behind a pointer, which a filter cannot follow; without it the C library uses clone.
    program += _when(JUMP_EQUAL, CLONE3[column], NO_SUCH_CALL)
    program += _unless_ordinary_clone(CLONE[column])
    program += _when_argument(PRLIMIT64[column], 0, JUMP_EQUAL, 0, ALLOW, DENY)
    program += _unless_unix_streams(SOCKETPAIR[column])
    program += _when_argument_in(FCNTL[column], 1, sorted(DENIED_FCNTL.values()))
    program += _when_argument(IOCTL[column], 1, JUMP_EQUAL, TIOCSTI, DENY, ALLOW)
    # A process that is not dumpable would hide its open files from the guard's accounting.
    program += _when_argument(PRCTL[column], 0, JUMP_EQUAL, kernel.PR_SET_DUMPABLE, DENY, ALLOW)
    return [*program, Instruction(RETURN, 0, 0, ALLOW)]


def _deny(denied: Sequence[int], *, from_number: int | None) -> list[Instruction]:
    """Search for a call's number by halves: the kernel tries a filter with every number when it is installed.

    Args:
        denied: numbers of calls, ascending.
        from_number: from here on all are denied; None if there is no such number.
    """
    # Where it changes whether numbers are denied; below the first they are not.
    changes = sorted({*denied} ^ {number + 1 for number in denied})
    changes += [] if from_number is None else [from_number]
    program = _search(changes, 0, len(changes))
    return [
        instruction._replace(value=len(program) - position - 1) if instruction.code == JUMP else instruction
        for position, instruction in enumerate(program)
    ]


def _search(changes: Sequence[int], low: int, high: int) -> list[Instruction]:
    if low == high:
        return [Instruction(RETURN, 0, 0, DENY) if low % 2 else Instruction(JUMP, 0, 0, 0)]  # to the end of the search
    middle = (low + high) // 2
    below, above = _search(changes, low, middle), _search(changes, middle + 1, high)
    assert len(below) <= MOST_SKIPPED
    return [Instruction(JUMP_AT_LEAST, len(below), 0, changes[middle]), *below, *above]


def _when(test: int, value: int, verdict: int) -> list[Instruction]:
    return [Instruction(test, 0, 1, value), Instruction(RETURN, 0, 0, verdict)]


def _when_argument(number: int, argument: int, test: int, value: int, then: int, otherwise: int) -> list[Instruction]:
    # The low 32 bits of an argument: what the kernel itself reads of an int.
    return [
        Instruction(JUMP_EQUAL, 0, 4, number),
        Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument),
        Instruction(test, 0, 1, value),
        Instruction(RETURN, 0, 0, then),
        Instruction(RETURN, 0, 0, otherwise),
    ]


def _when_argument_in(number: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    tests = [instruction for value in values for instruction in _when(JUMP_EQUAL, value, DENY)]
    return [
        Instruction(JUMP_EQUAL, 0, len(tests) + 2, number),
        Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * argument),
        *tests,
        Instruction(RETURN, 0, 0, ALLOW),
    ]


def _unless_ordinary_clone(number: int) -> list[Instruction]:
    # No namespaces, and no thread with descriptors of its own: the guard sees those of the process.
    return [
        Instruction(JUMP_EQUAL, 0, 6, number),
        Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS),
        Instruction(JUMP_ANY_BIT, 3, 0, CLONE_NEW_ANY),
        Instruction(JUMP_ANY_BIT, 0, 1, CLONE_THREAD),
        Instruction(JUMP_ANY_BIT, 0, 1, CLONE_FILES),
        Instruction(RETURN, 0, 0, ALLOW),
        Instruction(RETURN, 0, 0, DENY),
    ]


def _unless_unix_streams(number: int) -> list[Instruction]:
    return [
        Instruction(JUMP_EQUAL, 0, 6, number),
        Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS),
        Instruction(JUMP_EQUAL, 0, 3, AF_UNIX),
        Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8),
        Instruction(JUMP_ANY_BIT, 1, 0, NOT_A_STREAM),
        Instruction(RETURN, 0, 0, ALLOW),
        Instruction(RETURN, 0, 0, DENY),
    ]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class Filter:
    """A filter as the kernel reads it, made once and installed in many forks."""

    def __init__(self, program: Sequence[Instruction]) -> None:
        packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._description = _Program(len(program), ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._description)

    def install(self) -> None:
        """Install it for this process and all that it becomes.

        Raises:
            OSError: the kernel refused.
        """
        kernel.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._address)


@cache
def filter_for(machine: str, denies_metadata: bool) -> Filter:
    """Make the filter of ``build_filter``, once."""
    return Filter(build_filter(machine, denies_metadata=denies_metadata))
