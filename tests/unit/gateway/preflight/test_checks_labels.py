"""Rows must have a label where a grade may depend on it, and need none where no component reads one."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.preflight.checks import evaluation_dataset, train_dataset
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from tests.unit.gateway.builders import a_spec

ENVIRONMENT = {"kind": "environment"}
EPISODES = {"kind": "environment", "environments": [{"environment": "frozen_lake"}]}


def spec_with(
    path: Path, *components: dict[str, Any], episodes: dict[str, Any] | None = None, **data: Any
) -> ExperimentSpec:
    rollout = {"group_size": 2, "sampling": {"max_new_tokens": 8}} | ({"episodes": episodes} if episodes else {})
    sections = {"data": {"path": str(path)} | data, "rollout": rollout, "reward": {"components": list(components)}}
    return a_spec(**sections, evaluation={"path": str(path), "greedy": False})


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Rows without labels."""
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a", "seed": 3}\n')
    return tmp_path / "bare.jsonl"


def test_an_environment_that_grades_its_episodes_needs_no_label(bare: Path) -> None:
    spec = spec_with(bare, ENVIRONMENT, episodes=EPISODES)

    held_out = evaluation_dataset(spec)

    assert held_out is not None
    for dataset in (train_dataset(spec), held_out):
        task = dataset.task(0, group_size=1)
        assert (task.label, dict(task.metadata)) == (None, {"seed": 3})


def test_an_environment_is_given_the_label_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": 7}\n')

    assert train_dataset(spec_with(path, ENVIRONMENT, episodes=EPISODES)).task(0, group_size=1).label == "7"


@pytest.mark.parametrize(
    "component",
    [
        {"kind": "constant"},
        {"kind": "format"},
        {"kind": "regex", "pattern": "a+"},
        {"kind": "json_schema", "json_schema": {"type": "object"}},
        {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "template": "{response}"},
        {"kind": "reward_model", "path": "/nowhere"},
    ],
    ids=json.dumps,
)
def test_a_component_that_reads_no_label_needs_none(bare: Path, component: dict[str, Any]) -> None:
    assert train_dataset(spec_with(bare, component)).task(0, group_size=1).label is None
    assert train_dataset(spec_with(bare, component, label_column=None)).task(0, group_size=1).label is None


@pytest.mark.parametrize(
    "component",
    [
        {"kind": "numeric"},
        {"kind": "regex"},
        {"kind": "json_schema"},
        {"kind": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "template": "{response} {label}"},
        {"kind": "remote", "url": "http://127.0.0.1:1/"},
    ],
    ids=json.dumps,
)
def test_a_component_that_may_read_the_label_needs_one_beside_an_environment(
    bare: Path, component: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"no column 'label', which data\.label_column names"):
        train_dataset(spec_with(bare, ENVIRONMENT, component, episodes=EPISODES))


def test_a_column_that_is_named_must_be_there(bare: Path) -> None:
    with pytest.raises(DataError, match="no column 'answer'"):
        train_dataset(spec_with(bare, ENVIRONMENT, episodes=EPISODES, label_column="answer"))

    spec = spec_with(bare, ENVIRONMENT, episodes=EPISODES)
    source = {"path": str(bare), "columns": {"label": "answer"}}
    named = spec.model_copy(update={"data": DataConfig.model_validate({"sources": [source]})})
    with pytest.raises(DataError, match="no column 'answer'"):
        train_dataset(named)
