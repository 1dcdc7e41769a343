"""`pip install` into an environment of its own, from the package index, as the page of installing says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
LEAST = "torch, transformers, safetensors and jinja2 are not installed, which rollouts and trainers need"
WITHOUT_TORCH = (
    ("reward", "math_verify"), ("reward", "jsonschema"), ("data", "fsspec"), ("hub", "huggingface_hub"),
    ("plot", "matplotlib"),
)  # fmt: skip


def run(*command: str, code: int = 0, cwd: Path | None = None) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLOTILLA_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=kept, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout with an environment of its own: building writes beside the sources."""
    source = tmp_path_factory.mktemp("checkout")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / file, source)
    for package in ("flotilla", "services", "shared", "examples"):
        copytree(ROOT / package, source / package, symlinks=True, ignore=ignore_patterns("__pycache__", "prepared"))
    run(sys.executable, "-m", "venv", str(source / "venv"))
    yield source


def test_without_extras_it_is_a_client_and_says_in_a_sentence_what_a_fleet_needs(place: Path) -> None:
    python, flotilla = str(place / "venv" / "bin" / "python"), str(place / "venv" / "bin" / "flotilla")
    try:
        run(python, "-m", "pip", "install", "--quiet", ".", cwd=place)
    except AssertionError as error:
        if "Could not find a version" in str(error) or "Connection" in str(error):
            pytest.skip("the package index cannot be reached")
        raise

    assert run(flotilla, "--version").startswith("flotilla ")
    assert "is valid" in run(flotilla, "spec", "check", "examples/arithmetic/experiment.yaml", cwd=place)
    run(python, "-c", "import flotilla; flotilla.Client")
    assert "pip install 'flotilla[torch]'" in run(flotilla, "doctor", code=1, cwd=place)
    for words in (["run", "examples/arithmetic/experiment.yaml"], ["up"]):
        (said,) = run(flotilla, *words, code=4, cwd=place).splitlines()
        assert LEAST in said and "pip install 'flotilla[torch]' (in a checkout: pip install '.[torch]')" in said
    assert not (place / "runs").exists() and not (place / ".flotilla").exists()
    prepare = (python, "examples/arithmetic/prepare.py", "--output")
    assert "kept in" in run(*prepare, "kept", cwd=place), "a model that is kept needs no torch"
    (said,) = run(*prepare, "made", "--make", code=2, cwd=place).splitlines()
    assert said.startswith("torch is not installed") and "flotilla[torch]" in said


def test_extras_but_torch_bring_what_the_page_says(place: Path) -> None:
    python = str(place / "venv" / "bin" / "python")
    extras = ",".join(name for name, _ in WITHOUT_TORCH)
    try:
        run(python, "-m", "pip", "install", "--quiet", f".[{extras}]", cwd=place)
    except AssertionError as error:
        if "Could not find a version" in str(error) or "Connection" in str(error):
            pytest.skip("the package index cannot be reached")
        raise

    run(python, "-c", "; ".join(f"import {module}" for _, module in WITHOUT_TORCH))
