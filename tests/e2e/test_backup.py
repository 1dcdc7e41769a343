"""A fleet that works is backed up by command, and goes on elsewhere from its checkpoint."""

from pathlib import Path

import pytest
import yaml

from tests.e2e.test_fleet_commands import PATIENCE_SECONDS, Shell
from tests.fleet import make_experiment, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(880)]


def test_a_fleet_that_is_backed_up_while_it_works_goes_on_elsewhere(tmp_path: Path) -> None:
    here, there = Shell(tmp_path / "here"), Shell(tmp_path / "elsewhere" / "there")
    backup = tmp_path / "backup"
    spec = tmp_path / "spec.yaml"
    wanted = make_experiment(tmp_path, optimisation={"steps": 5000})
    wanted["checkpoint"]["every_steps"] = 2
    spec.write_text(yaml.safe_dump(wanted))

    here.run("up", "--port", "0", "--no-sandbox", "--detach")
    try:
        here.run("start", str(spec))
        experiment = here.status()["experiments"][0]["id"]
        path = f"/v1/experiments/{experiment}"
        until(lambda: here.look(path)["step"] >= 5, 2 * PATIENCE_SECONDS, "the first steps")

        said = here.run("backup", str(backup))
    finally:
        here.run("down")
    reached = int(said.split("database step ")[1].split(";")[0])
    here.data.rename(tmp_path / "gone")
    foreseen = there.run("restore", str(backup), "--dry-run")
    assert not there.data.exists()
    there.run("restore", str(backup), "--with-rights")  # its grader is a file of code
    assert there.data.stat().st_mode & 0o777 == 0o700
    there.run("up", "--port", "0", "--no-sandbox", "--detach")
    try:
        until(lambda: there.look(path)["step"] >= reached + 3, 2 * PATIENCE_SECONDS, "steps of the restored fleet")
        view, ledger = there.look(path), there.look(f"{path}/ledger")["train"]
    finally:
        there.run("down")
    assert f"{experiment}: running; database step {reached}" in foreseen
    assert view["state"] == "running" and ledger["balanced"], ledger
