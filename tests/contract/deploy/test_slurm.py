"""The script for Slurm, as far as it can be read: it sets variables and runs commands that there are."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from flotilla.cli.command_line import build_parser
from tests.contract.deploy.variables import unread_variables

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "slurm" / "fleet.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")


def test_it_is_a_script_that_a_shell_reads() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=30)


def test_every_variable_of_ours_is_one_that_the_code_reads() -> None:
    assert unread_variables(re.findall(r"FLOTILLA_[A-Z_]+", TEXT)) == []


@pytest.mark.parametrize(
    "line", sorted(set(re.findall(r"(?:^|[ ({])flotilla ([a-z]+ \"\$EXPERIMENT\"[^|;&})>]*)", TEXT)))
)
def test_commands_of_ours_are_ones_that_there_are(line: str) -> None:
    arguments = shlex.split(line.replace('"$EXPERIMENT"', "trial"))

    assert build_parser().parse_args(arguments).command == arguments[0]


def test_services_are_modules_that_exist() -> None:
    named = set(re.findall(r"flotilla\.services\.(\w+)", TEXT)) | set(re.findall(r"^ +place (\w+)", TEXT, re.MULTILINE))

    assert named == {"gateway", "reward", "sandbox", "trainer", "rollout"}


def test_the_last_checkpoint_has_less_time_than_the_signal_gives() -> None:
    [signal] = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", TEXT, re.MULTILINE)
    [stop] = re.findall(r"STOP_SECONDS:-(\d+)", TEXT)

    assert int(stop) + 45 < int(signal), "and the services their end"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here")
@pytest.mark.parametrize("script", [*(ROOT / "deploy").rglob("*.sh"), SCRIPT, *(ROOT / "docker").glob("*.sh")], ids=str)
def test_a_checker_of_shells_has_nothing_to_say(script: Path) -> None:
    found = subprocess.run(["shellcheck", "--exclude=SC2016", str(script)], capture_output=True, text=True, timeout=60)

    assert found.stdout == ""
