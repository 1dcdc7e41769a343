from dataclasses import replace

import numpy as np
import pytest

from flotilla.shared.telemetry.reward_metrics import (
    LONGEST_NAME,
    MOST_COMPONENTS,
    MOST_METRICS,
    MOST_SOURCES,
    Scored,
    SeriesNames,
    describe_rewards,
    series_name,
)
from flotilla.shared.testing.builders import a_trajectory


def sample(reward: float, source: str | None = None, **grade: dict[str, float]) -> Scored:
    return source, replace(a_trajectory(reward=reward), **grade)


def test_components_and_metrics_of_graders_are_measured_over_the_samples_that_have_them() -> None:
    scored = [
        sample(1.5, components={"exact": 1.0, "style": 0.5}, metrics={"remote/words": 4.0}),
        sample(0.0, components={"exact": 0.0}, metrics={}),
    ]

    found = describe_rewards(scored, SeriesNames())

    assert found == {
        "reward/exact/mean": 0.5,
        "reward/exact/std": 0.5,
        "reward/exact/min": 0.0,
        "reward/exact/max": 1.0,
        "reward/style/mean": 0.5,
        "reward/style/std": 0.0,
        "reward/style/min": 0.5,
        "reward/style/max": 0.5,
        "grader/remote/words/mean": 4.0,
        "grader/remote/words/min": 4.0,
        "grader/remote/words/max": 4.0,
    }


def test_each_data_source_has_series_of_its_own() -> None:
    scored = [
        sample(1.0, "gsm8k", components={"exact": 1.0}),
        sample(0.0, "gsm8k", components={"exact": 0.0}),
        sample(0.25, "openai/math", components={"exact": 0.25}, metrics={"exact/ms": 7.0}),
    ]

    found = describe_rewards(scored, SeriesNames())

    assert {name: value for name, value in found.items() if name.startswith("source/")} == {
        "source/gsm8k/reward/mean": 0.5,
        "source/gsm8k/reward/std": 0.5,
        "source/gsm8k/reward/exact/mean": 0.5,
        "source/openai_math/reward/mean": 0.25,
        "source/openai_math/reward/std": 0.0,
        "source/openai_math/reward/exact/mean": 0.25,
        "source/openai_math/grader/exact/ms/mean": 7.0,
    }


def test_names_that_a_grader_makes_up_are_bounded_in_number_over_all_steps() -> None:
    names = SeriesNames()
    for step in range(3):
        scored = [
            sample(
                1.0,
                f"source {step}/{number}",
                components={f"component {step}/{number}": 1.0},
                metrics={f"metric {step}/{number}": 1.0},
            )
            for number in range(MOST_METRICS)
        ]
        describe_rewards(scored, names)

    every = describe_rewards(scored, names) | describe_rewards([sample(1.0, components={"component 0/0": 1.0})], names)

    assert names.num_left_out > 0
    assert len([name for name in every if name.startswith("reward/")]) <= 4 * MOST_COMPONENTS
    assert len({name.split("/")[1] for name in every if name.startswith("source/")}) <= MOST_SOURCES
    assert every["reward/component_0/0/mean"] == 1.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("exact", "exact"),
        ("remote/score", "remote/score"),
        ("a b\n{}@", "a_b____"),
        ("//", "_/_/_"),
        ("über", "_ber"),
    ],
)
def test_a_name_is_made_safe(given: str, name: str) -> None:
    assert series_name(given) == name


def test_long_names_keep_apart() -> None:
    first, second = series_name("x" * 500 + "1"), series_name("x" * 500 + "2")

    assert first != second
    assert len(first) == len(second) == LONGEST_NAME


@pytest.mark.parametrize("name", ["mean", "std", "min", "max", "std_within_group", "source", "reward/mean"])
def test_no_name_of_a_grader_is_one_of_ours(name: str) -> None:
    ours = {"reward/mean", "reward/std", "reward/min", "reward/max", "reward/std_within_group"}

    found = describe_rewards([sample(1.0, name, components={name: 1.0}, metrics={name: 1.0})], SeriesNames())

    assert len(found) == 4 + 3 + 4
    assert ours.isdisjoint(found)
    assert np.isfinite(list(found.values())).all()
