"""A name that no series can have is refused with those that are near; one that has not begun is not."""

import re
from pathlib import Path

import pytest

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.metric_names import KNOWN, check_names

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_the_names_are_those_of_the_page() -> None:
    sections = PAGE.partition("## What bounds the speed")[0].splitlines()
    cells = [line.split("|")[1] for line in sections if line.startswith("|")]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}

    given = re.compile(r"LAG|COMPONENT|POOL|ROLLOUT|KIND|PROCESS|METRIC|SOURCE|SET|\.\.\.|(?<=@)[KN]")
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mine/*", "'mine/\\*' \\(names are given in full here\\): did you mean mine/scores"),
        ("evaluation/acc*", "in full here\\): did you mean evaluation/accuracy"),
        ("reward/*/mean", "did you mean reward/mean"),
        ("mine/score?s", "did you mean mine/scores"),
    ],
)
def test_a_pattern_is_no_name(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        check_names([name], ["mine/scores"])


def test_a_pattern_where_patterns_are_taken_matches_a_name() -> None:
    check_names(["mine/*", "loss/*", "rew?rd/mean"], ["mine/scores"], patterns=True)

    with pytest.raises(InvalidRequest, match="no run has a metric 'mine/skores\\*': did you mean mine/scores"):
        check_names(["mine/skores*"], ["mine/scores"], patterns=True)
