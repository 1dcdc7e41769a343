"""systemd units, and tasks for SkyPilot and dstack: files that those take, of variables and commands that there are."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.contract.deploy.variables import unread_variables

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"
NODE = (DEPLOY / "node.sh").read_text(encoding="utf-8")
SKYPILOT = sorted((DEPLOY / "skypilot").glob("*.yaml"))
DSTACK = DEPLOY / "dstack" / "fleet.dstack.yml"
UNITS = DEPLOY / "systemd"
UNIT = UNITS / "flotilla@.service"
OF_NODE = set(re.findall(r"\$\{(\w+):-", NODE)) | {"FLOTILLA_TOKEN", "FLOTILLA_SERVICE_TOKEN", "REDIS_PASSWORD", "HEAD"}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: path.name)
def test_skypilot_takes_every_task(path: Path) -> None:
    jsonschema.validate(read(path), schema("skypilot_task.json"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read(path), "num_node": 2}, schema("skypilot_task.json"))


def test_dstack_takes_the_task() -> None:
    jsonschema.validate(read(DSTACK), schema("dstack_task.json"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read(DSTACK), "node": 2}, schema("dstack_task.json"))


def environments() -> dict[str, set[str]]:
    found = {path.name: {*read(path).get("envs", {}), *read(path)["secrets"]} for path in SKYPILOT}
    found[DSTACK.name] = {each.partition("=")[0] for each in read(DSTACK)["env"]}
    return found


@pytest.mark.parametrize("name", sorted(environments()))
def test_every_variable_is_one_that_the_script_or_the_code_reads(name: str) -> None:
    given = environments()[name]

    assert {each for each in given if not each.startswith("FLOTILLA_")} <= OF_NODE
    assert unread_variables(given) == []
    assert {"FLOTILLA_SERVICE_TOKEN", "REDIS_PASSWORD"} <= given


@pytest.mark.parametrize("path", [*SKYPILOT, DSTACK], ids=lambda path: path.name)
def test_every_task_runs_the_script_with_number_count_and_first_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    [line] = [line.strip() for line in text.splitlines() if "deploy/node.sh" in line and "exec" in line]

    words = shlex.split(line)
    assert len(words[words.index("deploy/node.sh") + 1 :]) == 3
    for extra in re.findall(r"'\.\[([a-z,]+)\]'", text):
        pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{name} = [" in pyproject for name in extra.split(","))


def test_the_script_sets_variables_and_runs_services_that_there_are() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "node.sh")], check=True, timeout=30)
    assert unread_variables(re.findall(r"FLOTILLA_[A-Z_]+", NODE)) == []
    started = set(re.findall(r"service (\w+)", NODE)) | set(re.findall(r"flotilla\.services\.([a-z]+)", NODE))
    assert started == {"gateway", "reward", "trainer", "rollout"}


def settings(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "=" in line and not line.startswith("#")]
    return [(line.partition("=")[0], line.partition("=")[2]) for line in lines]


def test_units_set_variables_that_the_code_reads_and_credentials_that_they_load() -> None:
    for path in [UNIT, *UNITS.glob("*.service.d/*.conf")]:
        found = settings(path)
        names = [word.partition("=")[0] for key, value in found if key == "Environment" for word in value.split()]
        assert unread_variables(names) == []
        loaded = {value.partition(":")[0] for key, value in [*settings(UNIT), *found] if key == "LoadCredential"}
        for key, value in found:
            for name in re.findall(r"%d/([\w-]+)", value) if key == "Environment" else ():
                assert name in loaded
    for path in UNITS.glob("*.env"):
        assert unread_variables(name for name, _ in settings(path)) == []


def test_a_service_has_time_to_leave_and_a_drained_one_stays_away() -> None:
    found = dict(settings(UNIT))

    assert int(found["TimeoutStopSec"]) >= 45
    assert found["Restart"] == "on-failure"
    assert found["ExecStart"].endswith("-P -m flotilla.services.%i")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("kind", ["gateway", "sandbox", "rollout"])
def test_systemd_takes_the_unit_and_its_drop_in(kind: str, tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace("/opt/flotilla/bin/python", "/bin/true")
    unit = tmp_path / f"flotilla@{kind}.service"
    unit.write_text(text, encoding="utf-8")
    drop_in = UNITS / f"flotilla@{kind}.service.d"
    if drop_in.exists():
        shutil.copytree(drop_in, tmp_path / drop_in.name)

    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )

    about_ours = [line for line in (result.stdout + result.stderr).splitlines() if str(tmp_path) in line or "@" in line]
    assert about_ours == []
