"""A service that is not root: programs share its uid, so only namespaces or Landlock's scope keep them from it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.sandbox.languages import find_python
from tests.integration.sandbox import attacks
from tests.integration.sandbox.attacks import SIMPLE

NOBODY = 65534
ROOT = Path(__file__).parents[3]


def run_as_nobody(level: str, programs: list[dict[str, Any]]) -> dict[str, Any]:
    if os.getuid() != 0:
        pytest.skip("only root can start a service as another user; the other tests run as this user already")
    python = find_python(None)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [python, "-m", "tests.integration.sandbox.unprivileged", level],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), *packages]), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode != 0 and ("Permission denied" in done.stderr or "No module named" in done.stderr):
        pytest.skip(f"another user cannot run this checkout: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "unavailable" in answer:
        pytest.skip(f"level {level} is not available to other users: {answer['unavailable']}")
    return answer


@pytest.mark.parametrize("level", ["B", "C"])
def test_attacks_are_stopped_without_a_uid_of_ones_own(level: str) -> None:
    metadata = "import os\nfor p in ['/tmp', '/proc/self/cmdline']:\n  try: os.chmod(p, 0o777); print('BREACH')\n"
    metadata += "  except OSError: print('stopped')\n"
    programs = [{"language": "python", "code": attack.code} for attack in SIMPLE]
    programs.append({"language": "python", "code": attacks.FORK_BOMB, "run_timeout": 1.0})
    programs.append({"language": "python", "code": attacks.FILES, "stdin": f"/etc/passwd {ROOT}/pyproject.toml"})
    programs.append({"language": "python", "code": "print('works')"})
    if level == "C":
        programs.append({"language": "python", "code": attacks.SIGNALS, "stdin": "VICTIM"})
        programs.append({"language": "python", "code": metadata})
        programs.append({"language": "cpp", "code": "int main() { return 0; }"})

    answer = run_as_nobody(level, programs)

    assert answer["victim_lives"]
    for given, got in zip(programs, answer["answers"], strict=True):
        assert got["status"] != "SandboxError", (given, got)
        assert "BREACH" not in (got["run_result"]["stdout"] or ""), (given, got)
    assert answer["answers"][len(SIMPLE) + 2]["run_result"]["stdout"] == "works\n"
