"""A YAML file means what it and the files that its defaults name mean together, as with Hydra."""

from collections.abc import Mapping

import pytest

from flotilla.importers.build import build
from flotilla.importers.composition import Composition
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read
from flotilla.shared.errors import InvalidSpec


def composed(text: str, files: Mapping[str, str] | None = None) -> dict[str, object]:
    return Composition((files or {}).get, {"ours"}).read(text, source="launch.yaml")


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("defaults: [base]\na: 1", {"base": "a: 2\nb: 2"}, {"a": 1, "b": 2}),
        ("defaults: [_self_, base]\na: 1", {"base": "a: 2"}, {"a": 2}),
        ("defaults: [base, _self_]\na: 1", {"base": "a: 2"}, {"a": 1}),
        ("defaults: [../other/base@_here_]", {"../other/base": "a: 2"}, {"a": 2}),
        ("defaults: [base@x.y]", {"base": "a: 2"}, {"x.y.a": 2}),
        ("defaults: [group/base]", {"group/base": "a: 2"}, {"group.a": 2}),
        ("defaults: [group/base@_global_]", {"group/base": "a: 2"}, {"a": 2}),
        ("defaults: [{actor: fast}]", {"actor/fast": "a: 2"}, {"actor.a": 2}),
        ("defaults: [{actor@x.actor: fast}]", {"actor/fast": "a: 2"}, {"x.actor.a": 2}),
        ("defaults: [{optional actor: fast}]\na: 1", {}, {"a": 1}),
        ("defaults: [{actor: null}, {override hydra/job_logging: none}]\na: 1", {}, {"a": 1}),
        ("defaults: [ours, {actor: ours}]\na: 1", {"ours": "a: 3"}, {"a": 1}),
        ("defaults: [base]\na: {b: 1}", {"base": "a: 2"}, {"a.b": 1}),
        ("defaults: [base]\na: 1", {"base": "a: {b: 2}"}, {"a": 1}),
        ("defaults: [x/base]", {"x/base": "defaults: [more]\na: 1", "x/more": "a: 2\nb: 2"}, {"x.a": 1, "x.b": 2}),
    ],
)
def test_files_that_are_named_are_joined(text: str, files: dict[str, str], expected: dict[str, object]) -> None:
    found = composed(text, files)

    assert found.pop("defaults") is not None
    assert found == expected


@pytest.mark.parametrize(
    ("text", "files", "said"),
    [
        ("defaults: [base]", {}, "put it at base.yaml"),
        ("defaults: [base]", {"base": "defaults: [other]", "other": "defaults: [base]"}, "must not lead back"),
        ("defaults: [base]", {"base": "a: ["}, "base is not valid YAML"),
        ("defaults: base", {"base": "a: 1"}, "must be a list"),
        ("defaults: [3]", {}, "an entry of defaults"),
    ],
)
def test_what_cannot_be_joined_is_a_message_with_its_place(text: str, files: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        composed(text, files)

    assert said in caught.value.detail
    assert all(entry["path"] for entry in caught.value.errors)


def test_values_of_a_base_file_reach_the_spec() -> None:
    text = "defaults: [ppo_trainer, base, _self_]\ndata: {train_files: a.parquet}\ncustom_reward_function: {path: r.py}"
    base = "trainer: {total_training_steps: 7}\nactor_rollout_ref: {rollout: {n: 3}, model: {path: m}}"

    imported = build(SYSTEMS["verl"], read("verl", text, (), {}, source="f.yaml", beside={"base": base}.get))

    assert imported.spec is not None and not imported.report.refused
    assert (imported.spec.optimisation.steps, imported.spec.rollout.group_size) == (7, 3)


def test_a_name_of_the_files_own_is_no_parameter_but_a_typing_error_is() -> None:
    text = "my_length: 512\nresponse_length: ${my_length}\nactor_train: {x: 1}\nnowhere: 2\nmax_steps: ${actor_train.x}"

    report = build(SYSTEMS["roll"], read("roll", text, (), {}, source="f.yaml")).report

    verdicts = {entry.name: entry.verdict for entry in report.entries}
    assert verdicts["my_length"] is Verdict.IGNORED
    assert verdicts["nowhere"] is verdicts["actor_train.x"] is Verdict.REFUSED


def test_a_section_can_be_referred_to_as_a_whole() -> None:
    text = "a: {b: 1, c: {d: '${a.b}'}}\nx: ${a}"

    given = read("roll", text, (), {}, source="f.yaml")

    assert {each.spelling: each.value for each in given}["x"] == {"b": 1, "c": {"d": 1}}


@pytest.mark.parametrize("first", ["a0: x", f"a0: {'x' * 1000}", "a0: []"])
def test_interpolations_that_double_without_end_are_refused(first: str) -> None:
    lines = [first, *(f"a{number}: '${{a{number - 1}}} ${{a{number - 1}}}'" for number in range(1, 36))]

    with pytest.raises(InvalidSpec, match="at most"):
        read("verl", "\n".join(lines), (), {}, source="f.yaml")


def test_a_library_of_rolls_is_read_where_it_lies_beside_and_known_where_it_does_not() -> None:
    text = "defaults: [../config/deepspeed_zero2@_here_]\nactor_train: {strategy_args: {strategy_config: '${zero2}'}}"
    text = text.replace("${zero2}", "${deepspeed_zero2}")
    files = {"../config/deepspeed_zero2": "deepspeed_zero2: {zero_optimization: {stage: 2}}\nunused: 1"}

    found = build(SYSTEMS["roll"], read("roll", text, (), {}, source="f.yaml", beside=files.get)).report.entries
    known = read("roll", text, (), {}, source="f.yaml")

    entries = {entry.name: entry for entry in found}
    assert "'stage': 2" in entries["actor_train.strategy_args.strategy_config"].value
    assert entries["actor_train.strategy_args.strategy_config"].verdict is Verdict.UNSUPPORTED
    assert entries["unused"].verdict is entries["deepspeed_zero2.zero_optimization.stage"].verdict is Verdict.IGNORED
    assert {each.spelling: each.value for each in known}["actor_train.strategy_args.strategy_config"] == {}


def test_whole_numbers_are_keys_as_with_hydra() -> None:
    given = read("roll", "custom_envs: {grid: {0: wall, 1: floor}}", (), {}, source="f.yaml")

    assert {each.spelling: each.value for each in given} == {
        "custom_envs.grid.0": "wall",
        "custom_envs.grid.1": "floor",
    }


def test_a_file_of_nothing_that_is_named_holds_nothing() -> None:
    assert composed("defaults: [base]\na: 1", {"base": "\n"})["a"] == 1
