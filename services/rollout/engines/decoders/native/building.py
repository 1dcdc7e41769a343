"""Builds ``kernels.c`` with the machine's own compiler: once per machine and user, for the processor that is there.

The library lies in the user's cache directory, under a name that tells source, compiler and processor. One that another
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
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_SECONDS = 60.0


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Load the kernels, built before or now; None where they cannot be built, which is logged once."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.info("no C compiler, so the CPU computes by torch's operators alone")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, _cache_directory())))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        facts = {"cause": repr(error), "compiler_output": output[-400:].decode(errors="replace")}
        log.info("the kernels cannot be built, so the CPU computes by torch's operators alone", extra=facts)
        return None


def _built(compiler: str, directory: Path) -> Path:
    library = directory / f"kernels-{_digest(compiler)}.so"
    if not _is_ours(library):
        with tempfile.TemporaryDirectory(dir=directory) as building:
            made = Path(building) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
            made.replace(library)
    return library


def _is_ours(library: Path) -> bool:
    """Tell whether a library is there that nobody else could have written."""
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


def _digest(compiler: str) -> str:
    told = hashlib.sha256()
    for source in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        told.update(source.read_bytes())
    for fact in (compiler, str(Path(compiler).stat().st_mtime_ns), *FLAGS, platform.machine(), _processor()):
        told.update(fact.encode() + b"\0")
    return told.hexdigest()[:20]


def _processor() -> str:
    """Name the processor and what it can do: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features", "CPU part")))
