"""docs/metrics.md names every metric that is recorded."""

import re
from operator import sub
from pathlib import Path

from flotilla.importers.coverage import RECORDED
from flotilla.services.trainer.data.group_metrics import Totals, describe_groups
from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import RENAMED, StepResult
from flotilla.services.trainer.models.optimizer import UpdateResult
from flotilla.services.trainer.worker.step_times import StepTimes, describe_step
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.streams.plans import Plan
from flotilla.shared.telemetry.reward_metrics import SeriesNames, describe_rewards
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import a_trajectory

A_PLAN = Plan(1, 0, (0,), (), 0, 0, 3, (3,))

ROOT = Path(__file__).parents[3]
NAMES = re.compile(r"`([a-z_]+(?:/(?:[a-z_0-9]+|LAG|COMPONENT|METRIC|SOURCE|POOL))*)`")
DOCUMENTED = set(NAMES.findall((ROOT / "docs/metrics.md").read_text()))


GIVEN = {
    r"^lag/tokens/\d+$": "lag/tokens/LAG",
    r"^(tokens/trained_in_step)/spot$": r"\1/POOL",
    "numeric/ms": "METRIC",
    "numeric": "COMPONENT",
    "gsm8k": "SOURCE",
}
"""Patterns of what names are made of, and what the page calls it."""


def is_documented(name: str) -> bool:
    for pattern, placeholder in GIVEN.items():
        name = re.sub(pattern, placeholder, name)
    return name in DOCUMENTED


def test_every_figure_of_a_step_is_in_the_page() -> None:
    group = Group(a_task(0, group_size=1), (a_trajectory(2, [4], 1.0, versions=((0, 1), (3, 3))),))
    group = group.sampled_by("r-1", "spot")
    times = StepTimes()
    times.add(
        StepGroups(A_PLAN, (), False, wait_seconds=1.0, pace_seconds=0.0), compute=1.0, publish=0.0, checkpoint=0.0
    )
    result = StepResult((UpdateResult(grad_norm=1.0, learning_rate=0.1, is_applied=True),), {})

    recorded = describe_groups([group], 3, Totals(), sub) | describe_step(result, times, 0.0, ends_version=True)
    assert recorded["tokens/trained_in_step/spot"] == recorded["tokens/trained_in_step"]

    assert [name for name in [*recorded, *RENAMED.values(), *RECORDED] if not is_documented(name)] == []


def test_every_figure_of_what_graders_said_is_in_the_page() -> None:
    graded = a_trajectory(2, [4], None).graded(
        GradeStatus.SCORED, 1.0, components={"numeric": 1.0}, metrics={"numeric/ms": 3.0}
    )

    recorded = describe_rewards([("gsm8k", graded)], SeriesNames())

    assert len(recorded) > 8
    assert [name for name in recorded if not is_documented(name)] == []


def test_every_metric_that_the_code_names_is_in_the_page() -> None:
    """Names that are written out where an algorithm or the gateway measures: with a slash, and a known prefix."""
    pattern = re.compile(r'"((?:correction|evaluation|publication|admission|rollouter)/[a-z_0-9]+)"')
    places = [*(ROOT / "services/trainer/algorithms").rglob("*.py"), *(ROOT / "services/gateway").rglob("*.py")]
    named = {name for path in places for name in pattern.findall(path.read_text())}

    assert len(named) > 20
    assert [name for name in sorted(named) if not is_documented(name)] == []


def test_a_name_that_nobody_records_would_be_found() -> None:
    assert not is_documented("lag/tokens/")
    assert not is_documented("reward/median")
