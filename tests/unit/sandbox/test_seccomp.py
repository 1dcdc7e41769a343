"""The filter is run here by an interpreter of classic BPF, for both architectures."""

import errno
import struct
from collections.abc import Sequence

import pytest

from flotilla.services.sandbox.guard import seccomp
from flotilla.services.sandbox.guard.seccomp import ALLOW, DENY, KILL_PROCESS, NO_SUCH_CALL, Instruction, build_filter

MACHINES = ["x86_64", "aarch64"]
MOST_STEPS = 40
"""Of a filter for a call: the kernel takes so many for every number there is, when a program is confined."""
by_machine = pytest.mark.parametrize("machine", MACHINES)


def decide(program: Sequence[Instruction], machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    architecture = seccomp.ARCHITECTURES[machine] if arch is None else arch
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(value & (2**64 - 1) for value in padded))
    accumulator, position = 0, 0
    for _ in range(MOST_STEPS):
        code, jump_true, jump_false, value = program[position]
        position += 1
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == seccomp.RETURN:
            return value
        elif code == seccomp.JUMP:
            position += value
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_AT_LEAST: accumulator >= value,
                seccomp.JUMP_ANY_BIT: bool(accumulator & value),
            }[code]
            position += jump_true if holds else jump_false
    raise AssertionError(f"call {number} is not decided in {MOST_STEPS} steps")


@by_machine
def test_every_denied_call_is_denied(machine: str) -> None:
    program = build_filter(machine, denies_metadata=False)
    column = MACHINES.index(machine)

    for name, numbers in seccomp.DENIED.items():
        if numbers[column] is not None:
            assert decide(program, machine, numbers[column]) == DENY, name


@by_machine
@pytest.mark.parametrize("denies_metadata", [False, True])
def test_no_other_call_is_denied(machine: str, denies_metadata: bool) -> None:
    program = build_filter(machine, denies_metadata=denies_metadata)
    column = MACHINES.index(machine)
    tables = (seccomp.DENIED, seccomp.METADATA) if denies_metadata else (seccomp.DENIED,)
    denied = {numbers[column] for table in tables for numbers in table.values()}
    by_argument = {seccomp.PRLIMIT64, seccomp.SOCKETPAIR, seccomp.CLONE3}
    others = set(range(1000)) - denied - {numbers[column] for numbers in by_argument}

    assert {decide(program, machine, number) for number in others} == {ALLOW}


@by_machine
def test_what_programs_need_is_allowed(machine: str) -> None:
    program = build_filter(machine, denies_metadata=False)
    # read, write, openat, mmap, execve, exit_group, futex, wait4
    needed = {"x86_64": [0, 1, 257, 9, 59, 231, 202, 61], "aarch64": [63, 64, 56, 222, 221, 94, 98, 260]}[machine]

    assert {decide(program, machine, number) for number in needed} == {ALLOW}


@by_machine
def test_metadata_is_denied_only_where_the_uid_is_shared(machine: str) -> None:
    fchmod = {"x86_64": 91, "aarch64": 52}[machine]

    assert decide(build_filter(machine, denies_metadata=False), machine, fchmod) == ALLOW
    assert decide(build_filter(machine, denies_metadata=True), machine, fchmod) == DENY


@by_machine
def test_arguments_decide_where_they_matter(machine: str) -> None:
    program = build_filter(machine, denies_metadata=False)
    column = MACHINES.index(machine)
    clone, prlimit, pair = seccomp.CLONE[column], seccomp.PRLIMIT64[column], seccomp.SOCKETPAIR[column]

    assert decide(program, machine, clone, 0x11) == ALLOW
    assert decide(program, machine, clone, 0x10000011) == DENY
    assert decide(program, machine, clone, 0x3D0F00) == ALLOW  # a thread of the C library
    assert decide(program, machine, clone, 0x3D0F00 & ~0x400) == DENY  # the same with descriptors of its own
    assert decide(program, machine, seccomp.CLONE3[column]) == NO_SUCH_CALL
    assert decide(program, machine, prlimit, 0) == ALLOW
    assert decide(program, machine, prlimit, 4242) == DENY
    stream, datagram, raw, packets, close_on_exec = 1, 2, 3, 5, 0o2000000
    assert decide(program, machine, pair, seccomp.AF_UNIX, stream) == ALLOW
    assert decide(program, machine, pair, seccomp.AF_UNIX, stream | close_on_exec) == ALLOW
    assert decide(program, machine, pair, 2, stream) == DENY
    for kind in (datagram, raw, packets, datagram | close_on_exec):
        assert decide(program, machine, pair, seccomp.AF_UNIX, kind) == DENY
    for command in seccomp.DENIED_FCNTL.values():
        assert decide(program, machine, seccomp.FCNTL[column], 3, command) == DENY
    for command in (0, 1, 2, 3, 4, 6, 7, 1030, 1032):
        assert decide(program, machine, seccomp.FCNTL[column], 3, command) == ALLOW
    assert decide(program, machine, seccomp.IOCTL[column], 0, seccomp.TIOCSTI) == DENY
    assert decide(program, machine, seccomp.IOCTL[column], 0, 0x5401) == ALLOW


def test_another_architectures_calls_kill() -> None:
    program = build_filter("x86_64", denies_metadata=False)

    assert decide(program, "x86_64", 1, arch=0x40000003) == KILL_PROCESS


def test_the_x32_numbers_are_denied() -> None:
    program = build_filter("x86_64", denies_metadata=False)

    assert decide(program, "x86_64", 0x40000000 | 41) == DENY
    assert DENY & 0xFFFF == errno.EPERM


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        build_filter("riscv64", denies_metadata=False)
