"""A bad spec is answered by its field's path, the value, and what is allowed."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flotilla.shared.config.load.overrides import apply_overrides
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.load.spec_text import OTHER_NAMES, load_spec, parse_document, validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec


def a_document(**sections: Any) -> dict[str, Any]:
    return {
        "name": "trial",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl"},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 3},
        **sections,
    }


def test_a_minimal_spec_is_valid() -> None:
    spec = validate_spec(a_document())

    assert (spec.groups_per_step, spec.admission_budget) == (16, 24)


def test_a_spec_that_says_nothing_of_asynchrony_is_asynchronous() -> None:
    spec = validate_spec(a_document())

    assert (spec.asynchrony.staleness_threshold, spec.asynchrony.on_weight_update) == (0.5, "interrupt")
    assert spec.asynchrony.resolved_max_lag == 2
    assert spec.algorithm.correction == "auto"


@pytest.mark.parametrize("zero", [0, 0.0])
def test_one_line_makes_a_spec_on_policy(zero: float) -> None:
    spec = validate_spec(apply_overrides(a_document(), [f"asynchrony.staleness_threshold={zero}"]))

    assert (spec.admission_budget, spec.asynchrony.resolved_max_lag) == (spec.groups_per_step, 0)
    assert spec.asynchrony.on_weight_update == "drain"
    assert validate_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("optimisation.stepps=3", "optimisation.stepps", "did you mean optimisation.steps?"),
        ("steps=3", "steps", "did you mean optimisation.steps?"),
        (
            "algorithm.policy_loss={kind: ppo, clip_hgih: 1}",
            "algorithm.policy_loss.clip_hgih",
            "did you mean algorithm.policy_loss.clip_high?",
        ),
        ("optimisation.lr=1", "optimisation.lr", "it is optimisation.learning_rate here"),
        ("lr=1", "lr", "it is optimisation.learning_rate here"),
        ("algorithm.kl_coef=1", "algorithm.kl_coef", "it is algorithm.kl.coefficient here"),
        ("optimisation.batch_size=1", "optimisation.batch_size", "it is optimisation.groups_per_mini_batch here"),
        ("learning_rate=1", "learning_rate", "it is optimisation.learning_rate here"),
        ("beta=1", "beta", "it is algorithm.kl.coefficient here"),
        ("algorithm.learning_rate=1", "algorithm.learning_rate", "did you mean algorithm.value_loss.learning_rate?"),
        ("rollout.n=8", "rollout.n", "it is rollout.group_size here"),
        ("data.zzz=1", "data.zzz", "allowed here: chat_template_options, curriculum, data_source_column"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_name(override: str, path: str, hint: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(apply_overrides(a_document(), [override]))

    assert [entry["path"] for entry in caught.value.errors] == [path]
    assert hint in caught.value.detail


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("optimisation.steps=many", "optimisation.steps"),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature"),
        ("seed=-1", "seed"),
        ("name=a/b", "name"),
        ("optimisation.learning_rate=.inf", "optimisation.learning_rate"),
    ],
)
def test_a_wrong_value_is_answered_with_its_path_and_the_value(override: str, path: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(apply_overrides(a_document(), [override]))

    assert [entry["path"] for entry in caught.value.errors] == [path]
    assert "got" in caught.value.detail


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_what_other_systems_call_a_setting_is_answered_with_a_key_that_there_is(name: str) -> None:
    *sections, key = OTHER_NAMES[name].split(".")
    models: list[type[BaseModel]] = [ExperimentSpec]
    for section in sections:
        models = [inner for model in models for inner in models_in(model.model_fields[section].annotation)
                  if section in model.model_fields]  # fmt: skip

    assert any(key in model.model_fields for model in models)
    with pytest.raises(InvalidSpec, match=f"it is {re.escape(OTHER_NAMES[name])} here"):
        validate_spec(a_document(**{name: 1}))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def test_a_missing_key_is_named() -> None:
    document = a_document()
    del document["data"]

    with pytest.raises(InvalidSpec, match="data: this key is required"):
        validate_spec(document)


def test_an_item_of_a_wrong_kind_is_reported_once() -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(a_document(reward={"components": [{"kind": "numeri"}]}))

    assert [entry["path"] for entry in caught.value.errors] == ["reward.components.0"]


def test_a_setting_without_effect_is_refused_and_both_fields_are_named() -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(a_document(asynchrony={"staleness_threshold": 0, "on_weight_update": "interrupt"}))

    assert "asynchrony.on_weight_update" in caught.value.detail
    assert "asynchrony.staleness_threshold" in caught.value.detail


def test_a_max_lag_that_discards_everything_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"max_lag 0.*staleness_threshold"):
        validate_spec(a_document(asynchrony={"staleness_threshold": 0.5, "max_lag": 0}))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just words", ""])
def test_text_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec):
        parse_document(text, source="spec.yaml")


def test_a_key_that_stands_twice_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidSpec, match=r"line 3, column 1: the key 'name' stands twice"):
        parse_document("name: a\nseed: 1\nname: b\n", source="spec")


def test_keys_that_are_merged_in_may_be_replaced() -> None:
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n"

    assert parse_document(text, source="spec")["more"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.resampling={}", "kind is missing, which selects the kind: pow, max_min, max_random"),
        ("reward.shaping.normalisation={mean: batch}", "reward.shaping.normalisation.mean: Input should be 'group'"),
        ("reward.components=[{}]", "kind is missing, which selects the kind: exact, "),
        ("optimisation=3", "a section with keys of its own is wanted here"),
        ("algorithm.resampling={kind: max_min, power: 2}", "unknown key 'power'; allowed here: kind"),
    ],
)
def test_a_wrong_section_is_answered_with_the_way_out(override: str, words: str) -> None:
    document = apply_overrides(a_document(), [override])

    with pytest.raises(InvalidSpec) as caught:
        validate_spec(document)

    assert words in str(caught.value)


@pytest.mark.parametrize("override", ["nonsense", "=3", "name.deeper=1"])
def test_an_override_that_cannot_be_applied_is_refused(override: str) -> None:
    with pytest.raises(InvalidSpec, match="override"):
        apply_overrides(a_document(), [override])


def test_paths_are_taken_from_the_spec_files_folder() -> None:
    document = a_document(reward={"components": [{"kind": "custom", "path": "grade.py:score"}]})

    resolved = resolve_paths(document, Path("/specs"))

    assert resolved["model"]["path"] == "/specs/model"
    assert resolved["reward"]["components"][0]["path"] == "/specs/grade.py:score"
    assert document["model"]["path"] == "model"


def test_a_missing_file_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"nowhere\.yaml"):
        load_spec(tmp_path / "nowhere.yaml")


def test_the_resolved_spec_survives_its_own_json() -> None:
    spec = validate_spec(a_document(asynchrony={"staleness_threshold": 0.5}))

    assert validate_spec(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (["evaluation={path: a.jsonl, group_size: 2}"], "evaluation", "set greedy to false"),
        (["asynchrony={staleness_threshold: 0, max_lag: 2}"], "asynchrony", "remove max_lag"),
        (["asynchrony={staleness_threshold: 0, on_max_lag: drop}"], "asynchrony", "remove on_max_lag"),
        (["asynchrony.max_lag=0"], "asynchrony", "set staleness_threshold to 0"),
        (
            ["reward.components=[{kind: math, data_sources: [a]}]"],
            "reward.components.0.data_sources",
            "name the column",
        ),
        (["data.label_column=null"], "reward.components.0", "compares with a label"),
        (
            ["data.label_column=null", "reward.components=[{kind: regex}]"],
            "reward.components.0",
            "compares with a label",
        ),
        (["reward.components=[{kind: exact, correct: 0}]"], "reward.components.0", "give two values"),
        (["optimisation.betas=[0.9, 1]"], "optimisation.betas.1", "less than 1"),
        (["parallelism.device=cuda:x"], "parallelism.device", "should match pattern"),
        (["rollout.engine.device=gpu"], "rollout.engine.device", "should match pattern"),
        (["parallelism.world_size=2"], "parallelism", "parallelism.ranks processes share"),
        (["rollout.sampling.stop=['']"], "rollout.sampling.stop.0", "at least 1 character"),
        (["data.chat_template_options={tokenize: true}"], "data", "chat_template_options.tokenize"),
        (["algorithm.kl={placement: loss, log_ratio_bounds: [2, -2]}"], "algorithm.kl", "swap them"),
        (["reward.shaping={normalisation: {clip: [1, -1]}}"], "reward.shaping.normalisation.clip", "swap them"),
        (["reward.sample_mask={difficulty: [1, 0]}"], "reward.sample_mask", "swap them"),
        (
            ["algorithm.correction={veto: {lower: 3, upper: 2}}", "algorithm.old_log_probs=recompute"],
            "algorithm.correction.veto",
            "swap them",
        ),
    ],
)
def test_what_has_no_effect_or_cannot_work_is_refused_with_the_way_out(
    overrides: list[str], path: str, said: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(apply_overrides(a_document(), overrides))

    assert [entry["path"] for entry in caught.value.errors] == [path]
    assert said in caught.value.detail


def test_of_very_many_mistakes_the_first_are_named_and_the_others_counted() -> None:
    with pytest.raises(InvalidSpec, match=r"; and \d+ more$") as caught:
        validate_spec({f"k{number}": 1 for number in range(20_000)})

    assert len(caught.value.errors) == 20
    assert caught.value.context["num_more_errors"] >= 20_000 - 20
