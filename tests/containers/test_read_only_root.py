"""A fleet as in its containers, without their engine: it can write to its data, /tmp and /dev/shm, to nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fleet import ROOT, make_experiment

RUN_SECONDS = 280.0


def inside(data: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that sees everything and can write to nothing but ``data``, /tmp and /dev/shm."""
    walls = [
        "--unshare-user",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    ]
    # The checkout and its interpreter may lie below /tmp.
    places = ["--tmpfs", "/tmp", "--tmpfs", "/dev/shm", "--ro-bind", str(ROOT), str(ROOT)]
    places += ["--bind", str(data), "/tmp/data"]
    variables = {"HOME": "/home/nobody", "XDG_CACHE_HOME": "/tmp/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        ["bwrap", "--die-with-parent", *walls, *places, "--chdir", "/tmp/data", *command],
        env={**os.environ, **variables, "FLOTILLA_REDIS_URL": "", "FLOTILLA_START_PATIENCE": "4"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


def can_wall() -> bool:
    if shutil.which("bwrap") is None:
        return False
    probe = ["bwrap", "--unshare-user", "--uid", "1000", "--ro-bind", "/", "/", "true"]
    return subprocess.run(probe, capture_output=True, timeout=30).returncode == 0


pytestmark = pytest.mark.skipif(not can_wall(), reason="bubblewrap makes no namespaces here")


def test_nothing_else_can_be_written(tmp_path: Path) -> None:
    result = inside(tmp_path, "sh", "-c", "touch /tmp/a /dev/shm/a /tmp/data/a && ! touch /var/a && ! touch ~/a")

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_service_works_with_a_read_only_root_and_a_temporary_directory(tmp_path: Path) -> None:
    spec = make_experiment(tmp_path, optimisation={"steps": 2, "groups_per_mini_batch": 4})
    text = yaml.safe_dump(spec).replace(str(tmp_path), "/tmp/data")
    (tmp_path / "spec.yaml").write_text(text)

    result = inside(tmp_path, sys.executable, "-m", "flotilla", "run", "spec.yaml", "--plain", "--sandboxes", "1")

    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-3000:]}"
    assert "step 2/2" in result.stdout
