"""What is wrong is said in one clear message, with an exit code, no traceback, and nothing left running."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.fleet import FLOTILLA, ROOT, make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Change = Callable[[dict[str, Any], Path], None]


def run(spec: dict[str, Any], directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    marker = f"mark-{time.monotonic_ns()}"
    result = subprocess.run(
        [*FLOTILLA, "run", str(path), "--plain", "--runs", str(directory / "runs"), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FLOTILLA_REDIS_URL": "", "FLOTILLA_TEST_MARKER": marker, **environment},
    )
    assert_nothing_is_left(marker)
    return result


def assert_nothing_is_left(marker: str) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLOTILLA_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.cmdline())
        except psutil.Error:
            continue
    assert not left


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode not in {0, 130}, result.stdout
    said = result.stderr + result.stdout
    assert "Traceback" not in said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


def unknown_key(spec: dict[str, Any], directory: Path) -> None:
    spec["optimisation"]["stepps"] = 3


def wrong_type(spec: dict[str, Any], directory: Path) -> None:
    spec["rollout"]["group_size"] = "many"


def no_model(spec: dict[str, Any], directory: Path) -> None:
    spec["model"]["path"] = str(directory / "nowhere")


def no_column(spec: dict[str, Any], directory: Path) -> None:
    spec["data"]["prompt_column"] = "question"


def no_function(spec: dict[str, Any], directory: Path) -> None:
    spec["reward"]["components"][0]["path"] = f"{directory / 'grade.py'}:grade"


def raising_function(spec: dict[str, Any], directory: Path) -> None:
    (directory / "raise.py").write_text("def score(sample):\n    raise KeyError('no such column')\n")
    spec["reward"]["components"][0]["path"] = f"{directory / 'raise.py'}:score"
    spec["reward"]["max_consecutive_failures"] = 4


def broken_model(spec: dict[str, Any], directory: Path) -> None:
    broken = directory / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    spec["model"]["path"] = str(broken)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unknown_key, ("optimisation.stepps", "did you mean optimisation.steps?")),
        pytest.param(wrong_type, ("rollout.group_size", "'many'"), marks=pytest.mark.long),
        pytest.param(no_model, ("model.path", "nowhere"), marks=pytest.mark.long),
        pytest.param(no_column, ("question", "prompt", "answer"), marks=pytest.mark.long),
        pytest.param(no_function, ("grade.py", "score"), marks=pytest.mark.long),
        (raising_function, ("KeyError", "no such column", "raise.py")),
        pytest.param(broken_model, ("broken",), marks=pytest.mark.long),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_mistake_in_the_spec_is_one_clear_message(tmp_path: Path, change: Change, words: tuple[str, ...]) -> None:
    spec = make_experiment(tmp_path)
    change(spec, tmp_path)

    result = run(spec, tmp_path)

    assert_refused(result, *words)


def test_a_port_in_use_is_one_clear_message(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        result = run(make_experiment(tmp_path), tmp_path, "--port", str(port))

    assert_refused(result, str(port), "port")


def test_a_redis_that_is_gone_is_one_clear_message(tmp_path: Path) -> None:
    result = run(make_experiment(tmp_path), tmp_path, FLOTILLA_REDIS_URL="redis://127.0.0.1:1/0")

    assert_refused(result, "redis://127.0.0.1:1")


def test_a_spec_file_that_is_missing_is_one_clear_message(tmp_path: Path) -> None:
    result = subprocess.run(
        [*FLOTILLA, "run", str(tmp_path / "nowhere.yaml")], cwd=ROOT, capture_output=True, text=True, timeout=200
    )

    assert_refused(result, "nowhere.yaml")


def test_a_command_without_a_fleet_says_so(tmp_path: Path) -> None:
    result = subprocess.run(
        [*FLOTILLA, "status", "--data", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )

    assert_refused(result, "flotilla up")
