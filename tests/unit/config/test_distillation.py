"""A teacher in the spec: what it makes unnecessary, and what it makes useless."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.preflight.checks import paths_of, pinned, train_dataset
from flotilla.services.gateway.preflight.models import models_of
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, InvalidSpec

TEACHER: dict[str, Any] = {"path": "/teacher", "pure": True}
ALONE: dict[str, Any] = {
    "name": "distilled",
    "model": {"path": "/student"},
    "data": {"path": "/rows.jsonl"},
    "algorithm": {"distillation": TEACHER},
    "optimisation": {"steps": 3},
}
GRADED = {"reward": {"components": [{"kind": "exact"}]}}


def test_a_teacher_alone_needs_no_grader_and_no_group() -> None:
    spec = validate_spec(ALONE | {"rollout": {"group_size": 1}})

    assert [each.kind for each in spec.reward.components] == ["constant"]
    assert validate_spec(spec.model_dump(mode="json")) == spec
    assert not spec.needs_reference


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": {"distillation": {"path": "/teacher"}}}, "reward"),
        ({"evaluation": {"path": "/held_out.jsonl"}}, "reward"),
        ({"algorithm": {"distillation": TEACHER, "advantage": {"kind": "rloo"}}}, "algorithm.advantage"),
        ({"algorithm": {"distillation": TEACHER, "kl": {"placement": "reward"}}}, "algorithm.kl"),
        ({"algorithm": {"distillation": TEACHER, "supervised": {}}}, "algorithm.supervised"),
        ({"algorithm": {"distillation": TEACHER, "resampling": {"kind": "pow"}}}, "algorithm.resampling"),
        ({"reward": {"components": [{"kind": "exact"}], "filter_zero_spread": True}}, "reward.filter_zero_spread"),
        ({"reward": {"group_filter": {"kind": "spread_above"}}}, "reward.group_filter"),
        ({"health": {"max_groups_without_signal": 9}}, "health.max_groups_without_signal"),
        ({"job": {"kind": "sft"}}, "algorithm.distillation"),
        ({"algorithm": {"distillation": TEACHER | {"revision": "main"}}}, "revision"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(ALONE | changes)


def test_a_teacher_beside_rewards_still_compares_within_groups() -> None:
    beside = ALONE | GRADED | {"algorithm": {"distillation": {"path": "/teacher"}}}

    assert validate_spec(beside | {"reward": GRADED["reward"] | {"filter_zero_spread": True}}).algorithm.distillation
    with pytest.raises(InvalidSpec, match="nothing to compare"):
        validate_spec(beside | {"rollout": {"group_size": 1}})


SERVER: dict[str, Any] = {"url": "http://teacher.example.com:30000", "kind": "sglang"}


def behind(*servers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"distillation": {"pure": True, "servers": list(servers)} | changes}


def test_a_teacher_behind_a_url_is_no_model_of_this_machine() -> None:
    spec = validate_spec(ALONE | {"algorithm": behind(SERVER)})

    assert validate_spec(spec.model_dump(mode="json")) == spec
    assert set(models_of(spec)) == set(paths_of(spec)) - {"data.path"} == {"model.path"}
    assert pinned(spec) == spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": behind()}, "give one"),
        ({"algorithm": behind(SERVER, path="/teacher")}, "give one"),
        ({"algorithm": behind(SERVER, dtype="bfloat16")}, "dtype has no effect"),
        ({"algorithm": behind(SERVER, revision="main")}, "revision has no effect"),
        ({"algorithm": behind(SERVER | {"model": "big"})}, "model has no effect"),
        ({"algorithm": behind(SERVER | {"url": "ftp://teacher"})}, "not a URL"),
        ({"algorithm": behind(SERVER | {"kind": "ollama"})}, "kind"),
        ({"algorithm": behind(SERVER, SERVER)}, "name the data_sources of each"),
        (
            {"algorithm": behind(SERVER | {"data_sources": ["a", "b"]}, SERVER | {"data_sources": ["b"]})},
            "two teachers have the data source 'b'",
        ),
        ({"algorithm": behind(SERVER | {"data_sources": ["a"]})}, "data_source_column"),
        (
            {"algorithm": behind(SERVER), "rollout": {"sampling": {"temperature": 0.7}}},
            "temperature 1, and rollout.sampling.temperature is 0.7",
        ),
    ],
)
def test_what_does_not_go_with_a_teacher_behind_a_url_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(ALONE | changes)


def test_a_row_whose_data_source_has_no_teacher_is_found_before_the_start(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "from": "maths"}\n{"prompt": "q", "from": "law"}\n')
    data = {"path": str(rows), "label_column": None, "data_source_column": "from"}

    def spec_with(*sources: str) -> ExperimentSpec:
        servers = [SERVER | {"data_sources": [each]} for each in sources]
        return validate_spec(ALONE | {"data": data, "algorithm": behind(*servers)})

    assert len(train_dataset(spec_with("maths", "law")).rows) == 2
    with pytest.raises(DataError, match="row 1 of data has the data source 'law'"):
        train_dataset(spec_with("maths"))


def test_its_path_is_found_as_the_models_is(tmp_path: Path) -> None:
    local = resolve_paths(ALONE | {"algorithm": {"distillation": {"path": "models/teacher/big"}}}, tmp_path)
    hub = resolve_paths(ALONE | {"algorithm": {"distillation": {"path": "owner/teacher"}}}, tmp_path)

    assert local["algorithm"]["distillation"]["path"] == str(tmp_path / "models/teacher/big")
    assert hub["algorithm"]["distillation"]["path"] == "owner/teacher"
    spec = validate_spec(ALONE)
    assert models_of(spec)["algorithm.distillation.path"].path == "/teacher"
    assert paths_of(spec)["algorithm.distillation.path"] == "/teacher"


SEVERAL: dict[str, Any] = {
    "pure": True,
    "teachers": [
        {"path": "/maths", "data_sources": ["a", "b"]},
        {"path": "owner/law", "revision": "main", "dtype": "bfloat16", "data_sources": ["c"]},
    ],
}
BY_SOURCE: dict[str, Any] = {"data": ALONE["data"] | {"data_source_column": "from"}}


def test_several_teachers_are_models_of_the_trainer_each_of_its_data_sources(tmp_path: Path) -> None:
    spec = validate_spec(ALONE | BY_SOURCE | {"algorithm": {"distillation": SEVERAL}})

    assert spec.algorithm.distillation is not None
    assert spec.algorithm.distillation.data_sources == {"a", "b", "c"}
    assert {field: model.path for field, model in spec.algorithm.models.items()} == {
        "algorithm.distillation.teachers.0.path": "/maths",
        "algorithm.distillation.teachers.1.path": "owner/law",
    }
    assert spec.algorithm.models["algorithm.distillation.teachers.1.path"].revision == "main"
    assert validate_spec(spec.model_dump(mode="json")) == spec
    beside = {"distillation": {"teachers": [{"path": "maths", "data_sources": ["a"]}]}}
    resolved = resolve_paths(ALONE | BY_SOURCE | {"algorithm": beside}, tmp_path)
    assert resolved["algorithm"]["distillation"]["teachers"][0]["path"] == str(tmp_path / "maths")


@pytest.mark.parametrize(
    ("distillation", "named"),
    [
        (SEVERAL | {"path": "/teacher"}, "give one of these"),
        (SEVERAL | {"dtype": "bfloat16"}, "dtype has no effect with teachers, each of which has its own"),
        (SEVERAL | {"teachers": [{"path": "/a", "data_sources": []}]}, "data_sources"),
        (SEVERAL | {"teachers": [{"path": "/a", "data_sources": ["a"]}] * 2}, "two teachers have the data source 'a'"),
        (SEVERAL | {"teachers": [{"path": "/a", "revision": "main", "data_sources": ["a"]}]}, "a name on the hub"),
    ],
)
def test_what_several_teachers_cannot_be_is_refused(distillation: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(ALONE | BY_SOURCE | {"algorithm": {"distillation": distillation}})


def test_several_teachers_are_told_apart_by_a_column() -> None:
    with pytest.raises(
        InvalidSpec, match=r"distillation\.teachers are chosen by data source, and data\.data_source_col"
    ):
        validate_spec(ALONE | {"algorithm": {"distillation": SEVERAL}})
