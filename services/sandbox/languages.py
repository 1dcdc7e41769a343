"""The languages that can be run here: those whose tools are on the path that programs get."""

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.sandbox.guard.job import Phase
from flotilla.shared.errors import InvalidRequest

TOOL_PATH = "/usr/local/bin:/usr/bin:/bin"
ALIASES = {"nodejs": "javascript"}


@dataclass(frozen=True)
class Language:
    """How programs of one language are compiled and run.

    Attributes:
        tool: absolute path of the interpreter or compiler.
        source: name of the file that holds the program.
        options: between the tool and the source.
        compiled: name of the executable that the tool makes; None if the tool runs the source itself.
        limits_address_space: see ``apply_rlimits``; off for node, which reserves gigabytes that it does not use.
    """

    name: str
    tool: str
    source: str
    options: tuple[str, ...] = ()
    compiled: str | None = None
    limits_address_space: bool = True

    def phases(self, directory: str, stdin: str, compile_seconds: float, run_seconds: float) -> tuple[Phase, ...]:
        """Make the commands of one program in ``directory``; ``stdin`` is base64."""
        build = (self.tool, *self.options, self.source)
        if self.compiled is None:
            return (Phase("run", build, run_seconds, stdin, self.limits_address_space),)
        return (
            Phase("compile", (*build, "-o", self.compiled), compile_seconds, "", self.limits_address_space, True),
            Phase("run", (f"{directory}/{self.compiled}",), run_seconds, stdin, self.limits_address_space),
        )


def is_usable_by_others(path: Path) -> bool:
    """Return whether any uid may read and execute a file: programs do not run under ours."""
    parents_open = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    return parents_open and path.stat().st_mode & 0o005 == 0o005


def find_python(configured: str | None) -> str:
    """Choose the interpreter for programs and for the guard.

    Raises:
        InvalidRequest: the configured one cannot be executed by other uids, or none is found.
    """
    if configured is not None:
        if not os.access(configured, os.X_OK) or not is_usable_by_others(Path(configured).resolve()):
            raise InvalidRequest(f"the interpreter {configured!r} is missing or cannot be executed by every uid")
        return configured
    found = shutil.which("python3", path=TOOL_PATH)
    if found is not None:
        return found
    own = Path(sys.executable).resolve()
    if os.getuid() == 0 and not is_usable_by_others(own):
        raise InvalidRequest(f"there is no python3 on {TOOL_PATH}, and other uids cannot execute {own}; set `python`")
    return str(own)


def python_command(python: str) -> list[str]:
    """Make the command line of a Python program; that of the fork server, which becomes it, is the same."""
    return [python, "-s", "-B", "main.py"]


def find_languages(python: str) -> dict[str, Language]:
    """List what can be run here, by name."""
    _, *options, source = python_command(python)
    found = {"python": Language("python", python, source, tuple(options))}
    if (bash := shutil.which("bash", path=TOOL_PATH)) is not None:
        found["bash"] = Language("bash", bash, "main.sh")
    if (compiler := shutil.which("g++", path=TOOL_PATH)) is not None:
        found["cpp"] = Language("cpp", compiler, "main.cpp", ("-std=c++17", "-O2"), compiled="main")
    if (node := shutil.which("node", path=TOOL_PATH)) is not None:
        found["javascript"] = Language("javascript", node, "main.js", limits_address_space=False)
    return found


def choose(languages: Mapping[str, Language], name: str) -> Language:
    """Find a language by its name or by SandboxFusion's name for it.

    Raises:
        InvalidRequest: it is not available here; the message names those that are.
    """
    language = languages.get(ALIASES.get(name, name))
    if language is None:
        available = ", ".join(sorted(languages))
        raise InvalidRequest(
            f"language {name!r} is not available; available: {available}",
            errors=[{"field": "language", "value": name[:100], "allowed": available}],
        )
    return language
