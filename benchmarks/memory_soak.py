"""The slope of the memory of every process of a fleet over a long run of the arithmetic example.

``flotilla run`` trains the example with a constant learning rate and filtered groups kept, in a directory of its own;
meanwhile each of its processes is looked at every 2 s (``RssAnon`` and ``RssShmem``), with the step that the command
last printed. A slope is of a line through the points after the first quarter of the steps, in megabytes for 100 steps;
beside it is the standard error, and what the process had in each quarter on average. Processes that come and go are
left out. It ends with 1 if a slope is above ``--bound`` by more than three standard errors.

``python -m benchmarks.memory_soak [--steps 2000] [--seconds 840] [--json FILE]``
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Final

import psutil

from flotilla.shared.host.own_memory import own_bytes

LOOK_SECONDS: Final = 2.0
END_SECONDS: Final = 30.0
FEWEST: Final = 12
STEP: Final = re.compile(r"\bstep\s+(\d+)")
ROOT: Final = Path(__file__).parents[1]
EXAMPLE: Final = ROOT / "examples/arithmetic/experiment.yaml"


@dataclass(frozen=True)
class Row:
    """One process.

    Attributes:
        quarters: mean megabytes of each quarter of the points.
        slope, error: megabytes for 100 steps.
    """

    process: str
    points: int
    steps: int
    quarters: tuple[float, ...]
    slope: float
    error: float

    def line(self) -> str:
        """Format it for people."""
        quarters = " ".join(f"{each:8.1f}" for each in self.quarters)
        return f"{self.process:34} {self.points:5} {self.steps:6} {quarters} {self.slope:9.3f} {self.error:7.3f}"


HEADER: Final = f"{'process':34} {'looks':>5} {'steps':>6} {'MB in each quarter':>35} {'MB/100':>9} {'error':>7}"


def name_of(command: Sequence[str]) -> str:
    """Name a process by its module, or its program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1].removeprefix("flotilla.")
    return Path(command[0]).name if command else "?"


def row_of(process: str, points: Sequence[tuple[int, float]]) -> Row | None:
    """Fit a line to (step, megabytes) after the first quarter of the steps; None where there are too few."""
    later = [each for each in points if each[0] >= points[-1][0] / 4]
    if len(later) < FEWEST or later[0][0] == later[-1][0]:
        return None
    steps, values = zip(*later, strict=True)
    line = linear_regression(steps, values)
    mean = fmean(steps)
    spread = sum((step - mean) ** 2 for step in steps)
    rest = sum((y - line.intercept - line.slope * x) ** 2 for x, y in later)
    error = (rest / (len(later) - 2) / spread) ** 0.5
    size = len(points) / 4
    quarters = tuple(fmean([v for _, v in points[int(i * size) : int((i + 1) * size)]] or [0.0]) for i in range(4))
    return Row(process, len(points), later[-1][0] - later[0][0], quarters, 100 * line.slope, 100 * error)


def soak(steps: int, seconds: float, directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Run the example; megabytes of each process by the step.

    Raises:
        RuntimeError: the command failed before its time was over.
    """
    changes = [f"optimisation.steps={steps}", "reward.filter_zero_spread=false", "optimisation.learning_rate=1e-6"]
    changes += ["evaluation=null", "checkpoint.every_steps=200"]
    command = [sys.executable, "-m", "flotilla", "run", str(EXAMPLE), "--plain", "--runs", str(directory)]
    for each in changes:
        command += ["--set", each]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory)
    output, step, told = process.stdout, [0], []
    assert output is not None

    def read() -> None:
        for line in output:
            told.append(line)
            # Other figures stand beside the word, too, such as tokens of a step.
            if (found := STEP.search(line)) is not None and int(found.group(1)) <= steps:
                step[0] = int(found.group(1))

    reading = threading.Thread(target=read)
    reading.start()
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        if not step[0]:
            continue
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                status = Path(f"/proc/{each.pid}/status").read_text()
                points[f"{name_of(each.cmdline())} {each.pid}"].append((step[0], own_bytes(status) / 10**6))
            except (OSError, psutil.Error):
                continue
    is_cut = process.poll() is None
    if is_cut:
        process.terminate()
    process.wait(END_SECONDS)
    reading.join(END_SECONDS)
    if not is_cut and process.returncode:
        raise RuntimeError(f"flotilla run ended with {process.returncode}: {''.join(told[-20:])}")
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and say whether a slope is above the bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=840.0, help="after which the run is ended")
    parser.add_argument("--bound", type=float, default=1.0, help="megabytes for 100 steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="memory-soak-") as directory:
        points = soak(options.steps, options.seconds, Path(directory))
    found = [row for name, each in sorted(points.items()) if (row := row_of(name, each)) is not None]
    print(HEADER)
    for row in found:
        print(row.line())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")
    creeping = [row.process for row in found if row.slope - 3 * row.error > options.bound]
    if creeping:
        print(f"above {options.bound} MB for 100 steps: {', '.join(creeping)}")
    return 1 if creeping or not found else 0


if __name__ == "__main__":
    sys.exit(main())
