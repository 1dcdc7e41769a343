"""Runs that differ in their seed alone are one setting, and two settings differ where their seeds differ less."""

import json
import math
import random

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.comparison import ComparedSeries
from flotilla.cli.noise import as_chosen, have_seeds, over_seeds, paired, settings_of, spread_of, t_quantile, welch
from flotilla.shared.schemas.live_changes import LiveChange
from tests.unit.cli.test_comparison import ended, fleet_of
from tests.unit.cli.test_progress import point


def a_spec(lr: float, seed: int) -> dict[str, object]:
    return {"name": f"lr-{lr}-{seed}", "seed": seed, "optimisation": {"learning_rate": lr}}


SPECS = [a_spec(1e-3, 0), a_spec(1e-2, 0), a_spec(1e-3, 1), a_spec(1e-2, 1), a_spec(1e-3, 2), a_spec(1e-2, 2)]


def test_runs_that_differ_in_seed_and_name_alone_are_one_setting() -> None:
    assert settings_of(SPECS) == [((0, 2, 4), (0, 1, 2)), ((1, 3, 5), (0, 1, 2))]
    assert have_seeds(settings_of(SPECS))
    assert not have_seeds(settings_of(SPECS[:2])) and not have_seeds(settings_of([SPECS[0], SPECS[0]]))


def test_a_path_that_names_the_seed_is_the_same_path() -> None:
    specs = [{"seed": seed, "model": {"path": f"/made/standard-{seed}/model"}} for seed in (0, 1)]

    assert len(settings_of(specs)) == 1
    assert len(settings_of([specs[0], {"seed": 1, "model": {"path": "/made/standard-10/model"}}])) == 2


def test_what_a_rule_changed_in_one_seed_alone_makes_no_other_setting() -> None:
    def change(actor: str, before: float, after: float) -> LiveChange:
        keys = [{"path": "optimisation.learning_rate", "before": before, "after": after}]
        return LiveChange.model_validate({"id": actor, "at": "now", "actor": actor, "effect": "trainer", "keys": keys})

    plain, by_rule = a_spec(1e-3, 0), as_chosen(a_spec(1e-4, 1), [change("rule slower", 1e-3, 1e-4)])
    by_person = as_chosen(a_spec(1e-4, 1), [change("ana", 1e-3, 5e-4), change("rule slower", 5e-4, 1e-4)])

    assert len(settings_of([plain, by_rule])) == 1
    assert len(settings_of([plain, by_person])) == 2
    assert by_person["optimisation"]["learning_rate"] == 5e-4


def test_runs_of_equal_seeds_are_compared_in_pairs_since_a_seed_moves_both_alike() -> None:
    # Seeds differ by far more than the settings do, and each pair shows the same small gain.
    values = [10.0, 10.5, 20.0, 20.6, 30.0, 30.4]
    [compared] = over_seeds([ComparedSeries("reward/mean", 7, values)], settings_of(SPECS))

    assert [spread.mean for spread in compared.spreads] == [20.0, pytest.approx(20.5)]
    assert compared.spreads[0].deviation == 10.0
    [none, gain] = compared.differences
    assert none is None and gain is not None and gain.is_paired
    assert gain.value == pytest.approx(0.5)
    assert gain.half_width == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert gain.verdict == "more than noise"


def test_runs_of_other_seeds_are_compared_by_welch() -> None:
    # Checked by hand: variances 1 and 4, errors 1/3 + 4/3, freedom 2.94 and so the quantile of 2.
    difference = welch([3.0, 5.0, 7.0], [1.0, 2.0, 3.0])

    assert (difference.value, difference.is_paired) == (3.0, False)
    assert difference.half_width == pytest.approx(4.3027 * math.sqrt(5 / 3), rel=1e-6)
    assert difference.verdict == "within noise"


def test_one_seed_gives_no_band() -> None:
    assert welch([3.0], [1.0, 2.0]).verdict == "too few seeds"
    assert spread_of([3.0, None]) == (3.0, None, 1) and spread_of([None]) == (None, None, 0)


def test_series_without_a_common_step_compare_nothing() -> None:
    assert over_seeds([ComparedSeries("reward/mean", None, [1.0] * 6)], settings_of(SPECS)) == []


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2.9, 4.3027), (30, 2.0423), (60, 2.0003)])
def test_quantiles_are_those_of_students_distribution(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)


def test_an_interval_holds_the_truth_in_95_of_100_draws() -> None:
    chance, held = random.Random(7), 0
    for _ in range(2000):
        found = paired([chance.gauss(1.0, 2.0) for _ in range(4)])
        held += abs(found.value - 1.0) <= (found.half_width or 0.0)

    assert 0.93 < held / 2000 < 0.97


def test_the_command_shows_means_with_their_spread_and_says_what_is_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name, rate, seed, reward in (("a", 1.0, 0, 0.5), ("b", 2.0, 0, 0.75), ("c", 1.0, 1, 0.25), ("d", 2.0, 1, 0.5)):
        view = ended(name, rate)
        view = view.model_copy(update={"spec": {**view.spec, "seed": seed}})
        runs.append((view, [point("reward/mean", 4, reward)]))
    fleet_of(monkeypatch, *runs)

    assert main(["compare", "a", "b", "c", "d", "--metric", "reward/mean"]) == 0
    said = capsys.readouterr().out
    assert "A C" in said and "B D - A C" in said
    assert "0.375 ± 0.1768 (2)" in said and "+0.25 ± 0: more than noise" in said

    assert main(["compare", "a", "b", "c", "d", "--metric", "reward/mean", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["seeds"]
    assert found["settings"][1] == {"experiments": [1, 3], "seeds": [0, 1]}
    assert found["metrics"][0]["differences"][1]["verdict"] == "more than noise"

    assert main(["compare", "a", "b", "--metric", "reward/mean"]) == 0
    assert "seeds" not in capsys.readouterr().out
