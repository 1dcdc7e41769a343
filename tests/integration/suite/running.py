"""Runs of pytest on small projects, with the plugins of this suite."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fleet import ROOT
from tests.suite.processes import kill_marked

RUN_MARK = "FLOTILLA_RUN_MARK"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTEST_ADDOPTS": "",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # others are not needed, and take their time
    "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
    "FLOTILLA_RETRY_MARK": "",
}
INI = "[pytest]\ntimeout = 60\nhang_grace_seconds = 1\n"
CONFTEST = """
import os, pytest
from pathlib import Path

pytest_plugins = ["tests.suite.hangs", "tests.suite.retries", "tests.suite.schedule", "tests.suite.timings"]

@pytest.fixture
def is_first(request):
    mark = Path(__file__).with_name(f"{request.node.nodeid.replace('/', '.')}.mark")
    if mark.exists():
        return False
    mark.touch()
    return True
"""


@dataclass(frozen=True)
class Ended:
    """A run of pytest that has ended."""

    status: int
    output: str

    @property
    def closing_line(self) -> str:
        return re.sub(r" in [0-9.]+s.*", "", self.output.splitlines()[-1].strip("= "))

    @property
    def flaky(self) -> list[str]:
        return sorted(re.findall(r"^FLAKY (\S+)$", self.output, re.MULTILINE))


def run(folder: Path, *options: str, **files: str) -> Ended:
    """Run pytest on a project of these files; none of its processes may be left."""
    for name, content in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "pytest.ini").write_text(INI)
    mark = f"mark-{folder}"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--dist", "loadfile", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **ENVIRONMENT, RUN_MARK: mark},
    )
    assert kill_marked(**{RUN_MARK: mark}) == [], "processes were left"
    return Ended(ended.returncode, ended.stderr + ended.stdout)
