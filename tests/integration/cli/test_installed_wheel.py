"""The installed wheel works from any directory: also from one with folders named as our packages are."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PACKAGES = ("flotilla", "services", "shared")
SERVICE_KINDS = {"rollout", "reward", "sandbox", "trainer"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy: setuptools writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / file, source)
    for package in PACKAGES:
        copytree(ROOT / package, source / package, symlinks=True, ignore=ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(source / "dist")]
    _run([sys.executable, "-m", "pip", "wheel", *options, str(source)])
    (found,) = (source / "dist").glob("flotilla-*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install into an environment of its own, which has our dependencies but not this checkout; give its ``bin``."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False, symlinks=True)
    (site_packages,) = place.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    options = ["--no-deps", "--no-index", "--quiet", "--force-reinstall"]
    _run([sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", *options, str(wheel)])
    return place / "bin"


@pytest.fixture
def shadowed(tmp_path: Path) -> Iterator[Path]:
    """A user's directory with folders of our packages' names, whose import is an error."""
    for package in ("services", "shared"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise RuntimeError('{package} of the user is imported')\n")
    return tmp_path


def _run(command: list[str], **options: Any) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLOTILLA_", "PYTHON", "PIP_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=kept, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    tracked = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    names = (path.relative_to(ROOT).as_posix().removeprefix("flotilla/") for path in tracked)
    ours = {f"flotilla/{name}" for name in names}

    assert packed == ours
    assert {Path(name).suffix for name in packed} >= {".py", ".lua", ".mako"}


@pytest.mark.parametrize("command", [["flotilla"], ["python", "-m", "flotilla"]], ids=" ".join)
def test_the_command_line_is_ours_whatever_the_directory_holds(
    command: list[str], programs: Path, shadowed: Path
) -> None:
    program, *arguments = command

    answer = _run([str(programs / program), *arguments, "--help"], cwd=shadowed)

    assert "post-training fleet" in answer


SCRIPT = """
import flotilla.services.gateway.app
from flotilla import Client
from flotilla.shared.config.spec import ExperimentSpec

print(Client.__name__, ExperimentSpec.__name__, flotilla.__file__)
"""


def test_a_script_beside_folders_of_our_names_works_with_the_wheel(programs: Path, shadowed: Path) -> None:
    (shadowed / "script.py").write_text(SCRIPT)

    answer = _run([str(programs / "python"), "script.py"], cwd=shadowed).split()

    assert answer[:2] == ["Client", "ExperimentSpec"]
    assert Path(answer[2]).is_relative_to(programs.parent)


def test_a_script_beside_folders_of_our_names_works_with_this_checkout(shadowed: Path) -> None:
    (shadowed / "script.py").write_text(SCRIPT)

    answer = _run([sys.executable, "script.py"], cwd=shadowed).split()

    assert answer[:2] == ["Client", "ExperimentSpec"]


def test_a_fleet_comes_up_and_goes_down_whatever_the_directory_holds(programs: Path, shadowed: Path) -> None:
    flotilla = str(programs / "flotilla")
    _run([flotilla, "up", "--detach", "--port", "0"], cwd=shadowed)
    try:
        services = json.loads(_run([flotilla, "status", "--json"], cwd=shadowed))["services"]
    finally:
        _run([flotilla, "down"], cwd=shadowed)

    assert {service["kind"] for service in services} == SERVICE_KINDS
    logs = {path.name: path.read_text() for path in (shadowed / ".flotilla" / "logs").iterdir()}
    assert logs
    assert not any("of the user is imported" in text for text in logs.values())
