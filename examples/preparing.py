"""Makes what an example trains on, once: a directory that appears complete or not at all.

Each example has a ``settings`` module that decides the result and a ``building`` module that makes it, with
``build(directory, settings, say, report)``; that one imports torch, so it is imported only where something is made.
What is kept in the repository is taken by a module with the same ``build``, and with ``has(settings)``: without torch.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Protocol


class Settings(Protocol):
    """What decides a preparation's result: a dataclass with a fingerprint."""

    preset: str
    seed: int

    def fingerprint(self) -> str:
        """Hash all of it: equal fingerprints mean equal files."""


SUMMARY = "prepared.json"


class Progress:
    """Writes plain lines to standard output, no more often than ``interval_seconds`` unless told to."""

    def __init__(self, interval_seconds: float = 1.0) -> None:
        self._interval_seconds = interval_seconds
        self._started = self._last = time.monotonic()

    def say(self, text: str) -> None:
        """Write a line now."""
        self._last = time.monotonic()
        print(f"[{self._last - self._started:5.1f} s] {text}", flush=True)

    def report(self, text: str) -> None:
        """Write a line if the last one is old enough."""
        if time.monotonic() - self._last >= self._interval_seconds:
            self.say(text)


def is_prepared(output: Path, settings: Settings) -> bool:
    """Return whether ``output`` already holds what these settings make.

    Raises:
        FileExistsError: it holds something else.
    """
    try:
        found = json.loads((output / SUMMARY).read_text())["fingerprint"]
    except FileNotFoundError:
        if output.exists() and any(output.iterdir()):
            raise FileExistsError(f"{output} exists and was not made by this program; name another directory") from None
        return False
    if found != settings.fingerprint():
        raise FileExistsError(f"{output} was prepared with other settings; remove it or name another directory")
    return True


def prepare(output: Path, settings: Any, progress: Progress, building: str, *, with_torch: bool = True) -> None:
    """Fill a directory beside ``output`` and rename it when it is complete; a failure or Ctrl-C leaves nothing."""
    if with_torch:
        progress.say("loading torch")
        import torch  # noqa: F401  # seconds, which a call that finds all prepared does not spend

        progress.say("loading transformers")
    build = importlib.import_module(building).build

    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    started, started_cpu = time.monotonic(), time.process_time()
    try:
        measured = build(partial, settings, progress.say, progress.report)
        summary = {
            "fingerprint": settings.fingerprint(),
            "settings": asdict(settings),
            **measured,
            "wall_seconds": round(time.monotonic() - started, 1),
            "cpu_seconds": round(time.process_time() - started_cpu, 1),
        }
        (partial / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        partial.chmod(0o755)
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(
    description: str | None,
    building: str,
    presets: Sequence[str],
    settings_of: Callable[[str, int], Any],
    *,
    kept: str | None = None,
) -> int:
    """Parse the command line and prepare; 0 when the directory is there, 2 when it cannot be.

    Args:
        description: first paragraph of the program's help.
        building: name of the module that makes it.
        presets: names that ``--preset`` takes; the first is the default.
        settings_of: makes settings of a preset and a seed.
        kept: name of the module that takes what is kept in the repository.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--preset", choices=presets, default=presets[0])
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0)
    if kept is not None:
        parser.add_argument(
            "--make", action="store_true", help="make the model also where one is kept (default: take it)"
        )
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    settings = settings_of(arguments.preset, arguments.seed)
    try:
        if is_prepared(output, settings):
            print(f"already prepared: {output}")
            return 0
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    is_kept = kept is not None and not arguments.make and importlib.import_module(kept).has(settings)
    if not is_kept and find_spec("torch") is None:
        print("torch is not installed, which makes the model: pip install 'flotilla[torch]'", file=sys.stderr)
        return 2
    # Before torch is imported: on few cores, contending thread pools are several times slower than one thread.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    progress = Progress()
    progress.say(f"preparing {settings.preset}, seed {settings.seed}, in {output}")
    try:
        prepare(output, settings, progress, kept if is_kept and kept else building, with_torch=not is_kept)
    except KeyboardInterrupt:
        print("interrupted, nothing was kept", file=sys.stderr)
        return 130
    progress.say(f"done: {output}")
    return 0
