from pathlib import Path

import pytest
from pydantic import ValidationError

from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.sections.data import RowsConfig
from flotilla.shared.config.sections.episodes import EnvironmentConfig, PythonToolConfig
from flotilla.shared.config.sections.reward import CustomConfig


def resolved(folder: Path, reference: str) -> tuple[str, str, str, str]:
    document = {
        "reward": {"components": [{"kind": "custom", "path": reference}]},
        "data": {"sources": [{"custom": reference}]},
        "rollout": {"episodes": {"environments": [{"environment": reference}], "tools": [{"path": reference}]}},
    }
    found = resolve_paths(document, folder)
    episodes = found["rollout"]["episodes"]
    return (
        found["reward"]["components"][0]["path"],
        found["data"]["sources"][0]["custom"],
        episodes["environments"][0]["environment"],
        episodes["tools"][0]["path"],
    )


@pytest.mark.parametrize(
    ("reference", "file"),
    [
        ("grade.py:score", "grade.py:score"),
        ("grade:score", "grade.py:score"),
        ("pack:score", "pack/__init__.py:score"),
        ("pack.module:score", "pack/module.py:score"),
        ("pack/__init__.py:score", "pack/__init__.py:score"),
    ],
)
def test_a_file_and_a_module_are_the_same_code(tmp_path: Path, reference: str, file: str) -> None:
    (tmp_path / "pack").mkdir()
    for name in ("grade.py", "pack/__init__.py", "pack/module.py"):
        (tmp_path / name).touch()

    assert resolved(tmp_path, reference) == (f"{tmp_path}/{file}",) * 4


def test_a_module_that_is_not_in_the_folder_is_named_with_where_it_would_be(tmp_path: Path) -> None:
    assert resolved(tmp_path, "pack.module:score") == ("pack.module:score",) * 4
    for make in (
        lambda: CustomConfig(path="pack.module:score"),
        lambda: PythonToolConfig(kind="python", path="pack.module:score"),
        lambda: RowsConfig(custom="pack.module:score"),
        lambda: EnvironmentConfig(environment="pack.module:score"),
    ):
        with pytest.raises(ValidationError, match=r"neither pack/module\.py nor pack/module/__init__\.py"):
            make()


def test_an_environment_of_gymnasium_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "gymnasium.py").touch()

    assert resolved(tmp_path, "gymnasium:CartPole-v1")[2] == "gymnasium:CartPole-v1"


@pytest.mark.parametrize("kind", ["reward_model", "judge_model"])
def test_a_model_that_grades_is_found_from_the_specs_folder(tmp_path: Path, kind: str) -> None:
    paths = ("models/judge", "../judge", "owner/judge")
    components = [{"kind": kind, "path": path} for path in paths]
    (tmp_path / "models").mkdir()

    found = resolve_paths({"reward": {"components": components, "audit": {"components": components}}}, tmp_path)
    of_audit = [each["path"] for each in found["reward"]["audit"]["components"]]
    assert [each["path"] for each in found["reward"]["components"]] == of_audit
    assert of_audit == [f"{tmp_path}/models/judge", f"{tmp_path}/../judge", "owner/judge"]
