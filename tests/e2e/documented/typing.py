"""A reader who types what pages say, in a directory of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import until

SECONDS = 240.0


@dataclass(frozen=True)
class Typed:
    """A line as it is on a page, and how it is typed here.

    Attributes:
        page: path below the checkout.
        line: without its comment.
        swap: what is typed in place of parts of it; ``{name}`` stands for what the reader has learnt.
        code: exit status.
        interrupt: Ctrl-C once the output has this pattern.
    """

    page: str
    line: str
    swap: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    interrupt: str = ""


class Reader:
    """Types lines.

    Args:
        home: where; ``examples/arithmetic/experiment.yaml`` is there.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.known: dict[str, str] = {"home": str(home)}
        bin_directory = home / "bin"
        bin_directory.mkdir()
        for name, words in (("flotilla", "-P -m flotilla"), ("python", "")):
            (bin_directory / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (bin_directory / name).chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOTILLA_")}
        self.environment = {**kept, "PATH": f"{bin_directory}:{kept['PATH']}", "COLUMNS": "200"}

    def types(self, typed: Typed) -> str:
        """Type a line; return what it says."""
        text = typed.line
        for part, other in typed.swap.items():
            assert part in text, f"{typed.line!r} has no {part!r}"
            text = text.replace(part, other.format_map(self.known) if "{" in other else other)
        return self.runs(text, code=typed.code, interrupt=typed.interrupt)

    def runs(self, text: str, *, code: int = 0, interrupt: str = "") -> str:
        """Let a shell run a line."""
        program = next((word for word in ("jq", "curl") if re.search(rf"\b{word} ", text)), None)
        if program is not None and shutil.which(program) is None:
            pytest.fail(f"{program}, which the pages use, is not installed here")
        log = self.home / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", text],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if interrupt:
                    until(
                        lambda: re.search(interrupt, log.read_text()) or process.poll() is not None, SECONDS, interrupt
                    )
                    os.killpg(process.pid, signal.SIGINT)
                found = process.wait(SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(SECONDS)
        said = log.read_text(errors="replace")
        found = found if found >= 0 else 128 - found  # a shell that a signal ended itself
        assert found == code, f"{text}\nended with {found}, not {code}:\n{said}"
        assert "Traceback" not in said, f"{text}\n{said}"
        return said

    def view(self, name: str) -> dict[str, Any]:
        """Look at the experiment of that name."""
        listed: list[dict[str, Any]] = json.loads(self.runs(f"flotilla ls {name} --json"))
        return listed[0]

    def learns(self, name: str) -> None:
        """Remember the id of the newest experiment of a name."""
        self.known[name] = self.view(name)["id"]

    def waits(self, name: str, *, step: int | None = None, state: str | None = None) -> None:
        """Wait for an experiment."""
        end = time.monotonic() + SECONDS
        while True:
            view = self.view(name)
            if (step is None or view["step"] >= step) and (state is None or view["state"] == state):
                return
            assert view["state"] != "failed" and time.monotonic() < end, view
