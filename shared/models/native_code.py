"""Builds Flotilla's C files with the machine's own compiler: once per machine and user, for its processor.

A library lies in the user's cache directory, under a name made of sources, compiler and processor. One that another
user could have written is not loaded. A machine without a compiler does without: torch's operators do the same, slower.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
from pathlib import Path

from flotilla.shared.children.spawning import output_of

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC")
"""Without contraction: a compiler decides again in each copy of a function which products it fuses with sums,
and the bits would depend on which copy ran. The sources name what is fused."""
ON_THREADS, ON_ONE_THREAD = "-fopenmp", "-fopenmp-simd"
"""OpenMP is torch's own pool of threads: its library is loaded already, under the same name."""
BUILD_SECONDS = 60.0


@functools.cache
def load_library(source: Path, *, uses_threads: bool = True) -> ctypes.CDLL | None:
    """Load a C file as a library, built before or now; None where it cannot be built, which is logged once.

    Args:
        source: the file; headers beside it belong to it.
        uses_threads: whether it computes on torch's threads, or on its caller's alone.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.info("no C compiler, so the CPU computes by torch's operators alone", extra={"source": source.name})
        return None
    try:
        flags = (*FLAGS, ON_THREADS if uses_threads else ON_ONE_THREAD)
        return ctypes.CDLL(str(_built(source, compiler, flags, _cache_directory())))
    except OSError as error:
        facts = {"source": source.name, "cause": repr(error)}
        log.info("a C file cannot be built, so the CPU computes by torch's operators alone", extra=facts)
        return None


def _built(source: Path, compiler: str, flags: tuple[str, ...], directory: Path) -> Path:
    library = directory / f"{source.stem}-{_digest(source, compiler, flags)}.so"
    if not _is_ours(library):
        with tempfile.TemporaryDirectory(dir=directory) as building:
            made = Path(building) / library.name
            output_of([compiler, *flags, str(source), "-o", str(made), "-lm"], seconds=BUILD_SECONDS)
            made.replace(library)
    return library


def _is_ours(library: Path) -> bool:
    """Return whether a library exists that only this user could have written."""
    try:
        found = library.lstat()
    except FileNotFoundError:
        return False
    is_private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and is_private


def _cache_directory() -> Path:
    """Make the directory, or one of this process alone where the user's own cannot be had."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flotilla"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = home.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return home
    except OSError as error:
        log.debug("the cache directory cannot be used", extra={"cause": repr(error)})
    return _own_directory()


@functools.cache
def _own_directory() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="flotilla-kernels-")
    _KEPT.append(directory)
    return Path(directory.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _digest(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    told = hashlib.sha256()
    for file in (source, *sorted(source.parent.glob("*.h"))):
        told.update(file.read_bytes())
    for fact in (compiler, str(Path(compiler).stat().st_mtime_ns), *flags, platform.machine(), _processor()):
        told.update(fact.encode() + b"\0")
    return told.hexdigest()[:20]


def _processor() -> str:
    """Name the processor and what it can do: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features", "CPU part")))
