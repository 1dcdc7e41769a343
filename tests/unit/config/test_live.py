"""Which keys of a spec can change while its experiment runs, and what a change is."""

from typing import Any

import pytest

from flotilla.shared.config.load.live import (
    LIVE,
    applied,
    changed_live,
    differences,
    effect_of,
    group_settings,
    keys_between,
    refusal,
    undone,
)
from flotilla.shared.config.load.spec_text import validate_spec, with_changes
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.live_changes import ChangedKey, Effect, LiveChange, held_at, merged
from tests.unit.config.test_spec_text import a_document


def a_change(name: str, *keys: tuple[str, Any, Any], version: int | None = None, **fields: Any) -> LiveChange:
    known: dict[str, Any] = {"at": f"2026-01-01T00:00:0{name[-1]}.000Z", "actor": "anna", "effect": Effect.TRAINER}
    changed = tuple(ChangedKey(path=path, before=before, after=after) for path, before, after in keys)
    return LiveChange(id=name, keys=changed, version=version, **(known | fields))


SOURCES = [{"path": "/a.jsonl", "weight": 3}, {"path": "/b.jsonl", "weight": 1}]
FILTER = {"kind": "spread_above", "statistic": "range", "threshold": 0.0, "keep_single": True, "metric": None}
COMPONENTS = [{"kind": "numeric"}, {"kind": "format", "weight": 0.5}]


def of_two() -> dict[str, Any]:
    document = a_document()
    data = {name: value for name, value in document["data"].items() if name != "path"} | {"sources": SOURCES}
    return document | {"data": data, "reward": {"components": COMPONENTS}}


@pytest.mark.parametrize("path", ["data.sources.1.weight", "reward.components.1.weight"])
def test_weights_in_a_list_are_changed_by_their_number(path: str) -> None:
    spec = validate_spec(of_two())

    changed = changed_live(spec, nested(path, 0.25))

    before, after = spec.model_dump(mode="json"), changed.model_dump(mode="json")
    [key] = keys_between(before, after)
    assert (key.path, key.after, effect_of(path)) == (path, 0.25, Effect.GROUP)
    assert differences(before, after) == nested(path, 0.25)
    change = LiveChange(id="c", at="now", actor="anna", effect=Effect.GROUP, keys=(key,))
    assert applied(before, [change]) == after and undone(after, [change]) == before
    assert with_changes(spec, differences(before, after)) == changed


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("data.sources.2.weight", 1, r"data\.sources: the list has 2 items, numbered from 0, and '2' is none of them"),
        ("data.sources.0.path", "/c.jsonl", r"data\.sources\.0\.path: cannot change .*the order of rows"),
        ("data.sources.0.weight", 0, "is 0 for all: no row would be taken"),
        ("reward.components.0.tolerance", 1, r"reward\.components\.0\.tolerance: cannot change"),
    ],
)
def test_what_else_is_in_those_lists_cannot_change(path: str, value: Any, words: str) -> None:
    document = of_two()
    if value == 0:
        document["data"] = document["data"] | {"sources": [SOURCES[0], SOURCES[1] | {"weight": 0}]}
    with pytest.raises(InvalidSpec, match=words):
        changed_live(validate_spec(document), nested(path, value))


def nested(path: str, value: Any) -> dict[str, Any]:
    *sections, name = path.split(".")
    found: dict[str, Any] = {name: value}
    for section in reversed(sections):
        found = {section: found}
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimisation.learning_rate", 3e-5),
        ("optimisation.schedule", "linear"),
        ("algorithm.entropy_coefficient", 0.01),
        ("algorithm.policy_loss.clip_high", 0.4),
        ("asynchrony.staleness_threshold", 0.25),
        ("asynchrony.max_lag", 3),
        ("rollout.sampling.temperature", 0.7),
        ("rollout.sampling.max_new_tokens", 5),
        ("rollout.group_size", 3),
        ("reward.filter_zero_spread", True),
        ("reward.group_filter", FILTER),
        ("tracking.profiler.steps", [2]),
        ("tracking.profiler.engine_versions", [1, 2]),
    ],
)
def test_a_key_that_can_change_is_one_change_which_can_be_taken_back(path: str, value: Any) -> None:
    spec = validate_spec(a_document())

    changed = changed_live(spec, nested(path, value))

    before, after = spec.model_dump(mode="json"), changed.model_dump(mode="json")
    [key] = keys_between(before, after)
    assert (key.path, key.after) == (path, value)
    change = LiveChange(id="c", at="now", actor="anna", effect=LIVE[path], keys=(key,))
    assert applied(before, [change]) == after and undone(after, [change]) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, r"seed: cannot change while the experiment runs, since rows, samples and losses"),
        ({"model": {"dtype": "bfloat16"}}, r"model\.dtype: cannot change .* since trainer and rollouts have loaded it"),
        ({"optimisation": {"groups_per_mini_batch": 9}}, r"groups_per_mini_batch: cannot change .*optimiser"),
        ({"algorithm": {"policy_loss": {"kind": "gspo"}}}, r"algorithm\.policy_loss: cannot change .*which models"),
        ({"algorithm": {"kl": {"placement": "loss"}}}, r"algorithm\.kl: cannot change .*which models are loaded"),
        ({"optimisation": {"learning_rat": 1}}, r"did you mean optimisation\.learning_rate"),
        ({"optimisation": {"learning_rate": -1}}, r"optimisation\.learning_rate: .*greater than 0"),
        ({}, r"nothing is changed; what can be changed is resources\.\*, optimisation\.steps, optimisation\.learning"),
    ],
)
def test_what_cannot_change_says_why_and_how_to_fork(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words) as error:
        changed_live(validate_spec(a_document()), changes)

    if "cannot change" in words:
        assert "flotilla fork EXPERIMENT --set" in error.value.detail


def test_answers_grow_no_longer_than_engines_and_batches_were_laid_out_for() -> None:
    base = validate_spec(a_document(rollout={"sampling": {"max_new_tokens": 64}}))
    shorter = changed_live(base, nested("rollout.sampling.max_new_tokens", 16), base)

    longer = changed_live(shorter, nested("rollout.sampling.max_new_tokens", 64), base)

    assert longer.rollout.sampling.max_new_tokens == 64
    with pytest.raises(InvalidSpec, match="at most 64, for which engines and batches were laid out"):
        changed_live(shorter, nested("rollout.sampling.max_new_tokens", 65), base)


def test_a_temperature_stays_where_engines_were_started_to_record_by_it() -> None:
    def with_vllm(temperature: float, **sampling: float) -> ExperimentSpec:
        rollout = {"engine": {"kind": "vllm"}, "sampling": {"temperature": temperature, **sampling}}
        return validate_spec(a_document(rollout=rollout, algorithm={"old_log_probs": "recompute"}))

    def change(spec: ExperimentSpec, temperature: float) -> float:
        return changed_live(spec, nested("rollout.sampling.temperature", temperature)).rollout.sampling.temperature

    assert change(with_vllm(0.9), 1) == 1
    assert change(with_vllm(0.9, top_p=0.9), 0.7) == 0.7
    for before, after in ((0.9, 1), (1, 0.9)):
        with pytest.raises(InvalidSpec, match=r"temperature: engines were started to record log-probabilities"):
            change(with_vllm(before, top_p=0.9), after)


def test_a_bound_on_lag_stays_where_others_hold_to_it() -> None:
    spec = validate_spec(a_document(asynchrony={"redundant_groups": 2, "on_max_lag": "drop"}))

    with pytest.raises(InvalidSpec, match=r"asynchrony\.max_lag: cannot change with asynchrony\.redundant_groups"):
        changed_live(spec, nested("asynchrony.max_lag", 4))


def test_a_change_holds_from_its_version_on_and_none_that_waits_holds() -> None:
    early, late, waiting = (
        a_change("c1", ("a", 1, 2), version=3),
        a_change("c2", ("a", 2, 3), version=5),
        a_change("c3", ("a", 3, 4)),
    )

    assert [held_at([early, late, waiting], version) for version in (2, 3, 5)] == [(), (early,), (early, late)]


def test_groups_carry_the_newest_value_of_what_concerns_them() -> None:
    temperature = "rollout.sampling.temperature"
    changes = [
        a_change("c1", (temperature, 1.0, 0.7), version=1, effect=Effect.GROUP),
        a_change("c2", ("optimisation.learning_rate", 1e-6, 2e-6), version=1),
        a_change("c3", (temperature, 0.7, 0.5), version=2, effect=Effect.GROUP),
    ]

    assert group_settings(changes) == {temperature: 0.5}


def test_groups_carry_no_key_of_a_section_that_was_replaced_later() -> None:
    section, low, threshold = (f"reward.group_filter{end}" for end in ("", ".low", ".threshold"))
    spread = {"kind": "spread_above", "threshold": 0.0}
    changes = [
        a_change("c1", (low, 0.0, 0.5), effect=Effect.GROUP),
        a_change("c2", (section, {"kind": "mean_in_range", "low": 0.5}, spread), effect=Effect.GROUP),
        a_change("c3", (threshold, 0.0, 0.2), effect=Effect.GROUP),
    ]

    assert group_settings(changes) == {section: spread, threshold: 0.2}
    assert group_settings([*changes, a_change("c4", (section, spread, None), effect=Effect.GROUP)]) == {section: None}


def test_rules_of_filters_change_by_their_keys_and_not_where_nothing_is_graded() -> None:
    document = a_document() | {"reward": {"group_filter": {"kind": "mean_in_range"}}}
    spec = validate_spec(document)

    changed = changed_live(spec, nested("reward.group_filter.low", 0.25))
    other = changed_live(changed, {"reward": {"group_filter": None, "filter_zero_spread": True}})

    [key] = keys_between(spec.model_dump(mode="json"), changed.model_dump(mode="json"))
    assert (key.path, key.before, key.after, effect_of(key.path)) == (
        "reward.group_filter.low",
        0.0,
        0.25,
        Effect.GROUP,
    )
    assert (other.reward.group_filter, other.reward.filter_zero_spread) == (None, True)
    with pytest.raises(InvalidSpec, match=r"filter_zero_spread and reward\.group_filter both choose"):
        changed_live(spec, nested("reward.filter_zero_spread", True))


def test_two_accounts_of_the_same_changes_are_put_together() -> None:
    first, second = a_change("c1", ("a", 1, 2)), a_change("c2", ("a", 2, 3), version=4)
    held = first.model_copy(update={"version": 2})

    assert merged([first], [held, second]) == (held, second)
    assert merged([held, second], [first]) == (held, second), "what holds already is not taken back"


def test_what_is_missing_comes_after_the_one_that_it_followed_whatever_clocks_say() -> None:
    first, second, third, fourth = (a_change(f"c{n}", ("a", n, n + 1), version=n) for n in (4, 3, 2, 1))

    assert merged([first, fourth], [first, second, third]) == (first, second, third, fourth)
    assert merged([fourth], [first]) == (first, fourth), "nothing that is known came before"
    assert merged([first, fourth], [fourth]) == (first, fourth)


def test_a_known_change_takes_a_version_from_another_account_and_nothing_else() -> None:
    waiting = a_change("c1", ("a", 1, 2))
    other = a_change("c1", ("b", 5, 6), version=7, step=8, actor="eve")

    assert merged([waiting], [other]) == (waiting.model_copy(update={"version": 7, "step": 8}),)


def test_keys_of_agents_cannot_change_since_agents_were_started_with_them() -> None:
    said = refusal("rollout.agents.environment.parallel")

    assert "agents were started with it" in said
    assert "flotilla fork" in said
