"""A name that no series can have is refused with those that are near; one that has not begun is not."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla.client.series import KNOWN, check_names, read_series
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.experiment import MetricPoint

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_the_names_are_those_of_the_page() -> None:
    sections = PAGE.partition("## What bounds the speed")[0].splitlines()
    cells = [line.split("|")[1] for line in sections if line.startswith("|")]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}

    given = re.compile(r"LAG|COMPONENT|METRIC|SOURCE|SET|\.\.\.|(?<=@)[KN]")
    assert {given.sub("*", name) for name in names} == KNOWN


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reward/men", "did you mean reward/mean"),
        ("loss/totl", "did you mean loss/total"),
        ("evaluation/acuracy", "evaluation/accuracy"),
        ("accuracy", "evaluation/accuracy"),
        ("mine/score", "mine/scores"),
        ("zzz", "docs/metrics.md lists all names"),
    ],
)
def test_a_name_that_is_unknown_is_answered_with_those_near(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        check_names([name], ["mine/scores"])


@pytest.mark.parametrize("name", ["kl/mean", "lag/tokens/3", "evaluation/pass@8", "reward/numeric/mean", "mine/scores"])
def test_what_has_not_begun_and_what_is_seen_is_known(name: str) -> None:
    check_names([name], ["mine/scores"])


async def test_a_series_that_has_not_begun_is_empty_and_one_that_does_not_exist_is_refused() -> None:
    asked: list[Mapping[str, Any]] = []

    async def read(query: Mapping[str, Any]) -> list[MetricPoint]:
        asked.append(query)
        points = [MetricPoint(name="reward/mean", step=1, version=1, value=0.5)]
        return [point for point in points if point.name in query.get("names", point.name).split(",")]

    assert [point.step for point in await read_series(read, ["reward/mean"])] == [1]
    assert await read_series(read, ["kl/mean"]) == []
    assert asked == [{"names": "reward/mean"}, {"names": "kl/mean"}]
    with pytest.raises(InvalidRequest, match="no run has a metric 'reward/maen': did you mean reward/mean"):
        await read_series(read, ["reward/mean", "reward/maen"])
