from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import spec_document

DUMP: dict[str, Any] = {
    "name": "alone",
    "model": {"path": "/nowhere"},
    "data": {"dump": "/runs/mine"},
    "optimisation": {"steps": 30},
}


def refusal(**sections: Any) -> str:
    with pytest.raises(InvalidSpec) as error:
        validate_spec(spec_document(**sections))
    return error.value.detail


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give either path or sources, got neither"),
        ({"path": "a.jsonl", "sources": [{"path": "b.jsonl"}]}, "give either path or sources, got both"),
        ({"sources": []}, "data.sources: at least 1 of these must be given, 0 are"),
        ({"sources": {"path": "a.jsonl"}}, "data.sources: must be a list"),
        ({"sources": ["a.jsonl"]}, "data.sources.0: a section with keys of its own is wanted here, got 'a.jsonl'"),
        ({"sources": [{"hub": "s3://a/b"}]}, "a dataset's name on the hub, as owner/name; a path or URL belongs into"),
        ({"path": "a.jsonl", "sources": None, "chat_template_options": [1]}, "must be a mapping of keys to values"),
        ({"sources": [{"path": "a.jsonl", "columns": {"promt": "x"}}]}, "data.sources.0.columns.promt: "),
        ({"sources": [{}]}, "exactly one of path, hub and custom, got none"),
        ({"sources": [{"path": "a.jsonl", "hub": "a/b"}]}, "got path and hub"),
        ({"sources": [{"path": "a.jsonl", "split": "test"}]}, "split has no effect beside path 'a.jsonl'"),
        ({"sources": [{"path": "a", "revision": "v1"}]}, "revision has no effect beside path 'a': use it with hub"),
        ({"sources": [{"hub": "a/b", "options": {}}]}, "options has no effect beside hub 'a/b'"),
        (
            {"sources": [{"custom": "rows.txt:Rows"}]},
            "data.sources.0.custom: there is neither rows/txt.py nor rows/txt/__init__.py",
        ),
        ({"sources": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}]}, "sources.1.weight is missing"),
        ({"sources": [{"path": "a.jsonl", "weight": 1}]}, "there is no other source to weigh against"),
        (
            {"max_rows": 5, "sources": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 2}]},
            "max_rows has no effect beside weights",
        ),
        ({"sources": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 2000}]}, "at most 1000 times"),
        ({"sources": [{"path": "a.jsonl", "data_source": "x"}]}, "sources.0.data_source needs data.data_source_column"),
        ({"sources": [{"path": "a.jsonl", "only_data_sources": ["x"]}]}, "needs data.data_source_column"),
        (
            {"label_column": None, "sources": [{"path": "a.jsonl", "columns": {"label": "x"}}]},
            "sources.0.columns.label needs data.label_column",
        ),
        (
            {
                "data_source_column": "s",
                "sources": [{"path": "a.jsonl", "data_source": "x", "only_data_sources": ["x"]}],
            },
            "only_data_sources has no effect",
        ),
        ({"path": "a.parquet", "format": "verl", "label_column": "answer"}, "format verl makes label_column"),
        ({"path": "a.jsonl", "input_template": "Question: "}, "must hold {} exactly once"),
        ({"path": "a.jsonl", "input_template": "{}", "system_prompt": "s"}, "system_prompt has no effect beside"),
        (
            {"path": "a.jsonl", "input_template": "{}", "chat_template_options": {"a": 1}},
            "chat_template_options has no effect beside input_template",
        ),
        ({"path": "a.jsonl", "overlong": {"kind": "truncate"}}, "data.overlong.side"),
        ({"path": "a.jsonl", "overlong": {"kind": "cut"}}, "'error', 'truncate', 'filter'"),
        ({"path": "a.jsonl", "max_prompt_tokens": 2041}, "is more than the 2040 that rollout.engine.context_tokens"),
    ],
)
def test_what_contradicts_itself_or_has_no_effect_is_refused(data: dict[str, Any], message: str) -> None:
    assert message in refusal(data=data)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({}, "give either path or sets, got neither"),
        ({"path": "a.jsonl", "sets": [{"name": "a", "path": "a.jsonl"}]}, "got both"),
        ({"max_rows": 3, "sets": [{"name": "a", "path": "a.jsonl"}]}, "max_rows has no effect beside sets"),
        ({"sets": [{"name": "a", "path": "a.jsonl"}, {"name": "a", "path": "b.jsonl"}]}, "two are called 'a'"),
        ({"sets": [{"path": "a.jsonl"}]}, "evaluation.sets.0.name"),
        ({"path": "a.jsonl", "temperature": 0.6}, "temperature has no effect while evaluation.greedy is true"),
        ({"path": "a.jsonl", "greedy": True, "top_k": 0}, "top_k has no effect while evaluation.greedy is true"),
        ({"path": "a.jsonl", "greedy": False, "top_p": 0}, "evaluation.top_p"),
        ({"sets": [{"name": "a", "path": "a.jsonl", "weight": 1}]}, "unknown key 'weight'"),
        ({"sets": [{"name": "a", "path": "a.jsonl", "data_source": "x"}]}, "evaluation.sets.0.data_source needs"),
    ],
)
def test_the_same_holds_of_held_out_sets(evaluation: dict[str, Any], message: str) -> None:
    assert message in refusal(evaluation=evaluation)


def test_a_prompts_room_is_what_the_longest_completion_leaves() -> None:
    spec = validate_spec(spec_document(evaluation={"path": "/a.jsonl", "max_new_tokens": 48}))

    assert spec.max_prompt_tokens == 2048 - 48
    assert validate_spec(spec_document(data={"path": "/a.jsonl", "max_prompt_tokens": 9})).max_prompt_tokens == 9


def test_the_columns_of_verl_stay_when_the_spec_is_written_out() -> None:
    spec = validate_spec(spec_document(data={"path": "/a.parquet", "format": "verl"}))

    assert spec.data.label_column == "reward_model.ground_truth"
    assert validate_spec(spec.model_dump(mode="json")) == spec


def test_every_local_path_is_taken_from_the_specs_folder(tmp_path: Any) -> None:
    document = {
        "data": {
            "sources": [{"path": "a.jsonl"}, {"path": "s3://b/a.jsonl"}, {"custom": "c.py:Rows"}, {"hub": "o/n"}, 3]
        },
        "evaluation": {"sets": [{"name": "x", "path": "held"}, {"name": "y", "path": "/h.jsonl"}]},
    }

    resolved = resolve_paths(document, tmp_path)

    assert resolved["data"]["sources"] == [
        {"path": f"{tmp_path}/a.jsonl"}, {"path": "s3://b/a.jsonl"}, {"custom": f"{tmp_path}/c.py:Rows"},
        {"hub": "o/n"}, 3,
    ]  # fmt: skip
    assert [each["path"] for each in resolved["evaluation"]["sets"]] == [f"{tmp_path}/held", "/h.jsonl"]
    assert resolve_paths({"data": {"path": "hf://datasets/o/n/a.parquet"}}, tmp_path)["data"]["path"].startswith("hf:")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"job": {"kind": "sft"}}, "job.kind sft does not train"),
        ({"algorithm": {"old_log_probs": "recompute_at_version"}}, "recompute_at_version"),
        ({"resources": {"sharing": "time"}}, "needs no rollouts"),
    ],
)
def test_what_cannot_hold_for_a_dump_is_refused(sections: dict[str, Any], named: str) -> None:
    graded = {} if "job" in sections else {"reward": {"components": [{"kind": "exact"}]}}
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(DUMP | graded | sections)


def test_a_dump_takes_the_place_of_the_sources_and_may_stand_beside_them() -> None:
    graded = DUMP | {"reward": {"components": [{"kind": "exact"}]}}
    spec = validate_spec(graded)
    beside = validate_spec(graded | {"data": {"path": "rows.jsonl", "dump": "/runs/mine"}})

    assert not (spec.samples_answers or spec.needs_rollouts)
    assert spec.trains
    assert [each.location() for each in beside.data.all_sources] == ["/runs/mine"]
    assert resolve_paths({"data": {"dump": "runs/mine"}}, Path("/here"))["data"]["dump"] == "/here/runs/mine"
