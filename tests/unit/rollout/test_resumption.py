"""Which tokens of an earlier rollout are used."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import ResumeRule
from flotilla.services.rollout.episodes.resumption import Begun, begun, resume_rule, rule_of
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory
from flotilla.shared.testing.builders import a_task, a_trajectory

MIXING = ResumeRule(mixes_versions=True, max_lag=2)


def a_partial(versions: Any = ((0, 3),), tokens: int = 5, *, finished: bool = False) -> Trajectory:
    reason = FinishReason.STOP if finished else FinishReason.ABORTED
    return a_trajectory(prompt_tokens=3, sampled_tokens=tokens, versions=versions, finish_reason=reason)


def sort_out(member: Trajectory, rule: ResumeRule, serving: int, **task: Any) -> Begun:
    answered = a_task(0, **task)
    prompt = member.token_ids[:3].tolist()
    return begun(answered, (None, member), prompt, rule_of(answered, rule), serving, max_new_tokens=8)


@pytest.mark.parametrize(
    ("rule", "versions", "serving", "is_kept"),
    [
        (ResumeRule(), ((0, 3),), 3, True),
        (ResumeRule(), ((0, 3),), 4, False),
        (ResumeRule(), ((0, 3),), 2, False),
        (ResumeRule(), ((0, 2), (2, 3)), 3, False),
        (MIXING, ((0, 3),), 5, True),
        (MIXING, ((0, 3), (2, 5)), 6, False),
        (MIXING, ((0, 3),), 2, True),
    ],
)
def test_the_rule_goes_by_the_version_that_serves(
    rule: ResumeRule, versions: tuple[tuple[int, int], ...], serving: int, is_kept: bool
) -> None:
    assert rule.allows(versions, serving) is is_kept


def test_an_unfinished_member_becomes_a_prefix_of_its_completion() -> None:
    member = a_partial(((0, 3), (5, 4)))

    found = sort_out(member, MIXING, 4)

    assert found.finished == {}
    prefix = found.prefixes[1]
    assert prefix.token_ids == tuple(member.token_ids[3:].tolist())
    assert np.float32(prefix.log_probs).tolist() == member.log_probs[3:].tolist()
    assert prefix.versions == ((0, 3), (2, 4))


def test_a_finished_member_is_kept_while_it_is_young_enough() -> None:
    member = a_partial(finished=True)

    assert sort_out(member, MIXING, 5).finished == {1: member}
    assert sort_out(member, MIXING, 6) == Begun({}, {})
    assert sort_out(member, ResumeRule(max_lag=1), 4).finished == {1: member}, "it mixes nothing: it is finished"


def test_a_finished_member_of_a_pinned_task_is_of_the_pinned_version() -> None:
    member = a_partial(finished=True)

    assert sort_out(member, MIXING, 3, pinned_version=3).finished == {1: member}
    assert sort_out(member, MIXING, 4, pinned_version=4) == Begun({}, {})


def test_what_does_not_fit_the_task_is_of_no_use() -> None:
    member = a_partial()
    other_mask = replace(member, loss_mask=np.array([0, 0, 0, 1, 0, 1, 1, 1], np.uint8))

    assert sort_out(member, MIXING, 3, min_version=4) == Begun({}, {})
    assert sort_out(a_partial(tokens=8), MIXING, 3) == Begun({}, {}), "as many tokens as a completion may have"
    assert begun(a_task(), (member, None), [9, 9, 9], MIXING, 3, 8) == Begun({}, {})
    assert begun(a_task(), (other_mask, None), member.token_ids[:3].tolist(), MIXING, 3, 8) == Begun({}, {})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, ResumeRule(mixes_versions=True, max_lag=2)),
        ({"staleness_threshold": 0}, ResumeRule()),
        ({"staleness_threshold": 0.5, "on_weight_update": "drain"}, ResumeRule(max_lag=2)),
        ({"staleness_threshold": 0.5, "on_weight_update": "continue"}, ResumeRule(mixes_versions=True, max_lag=2)),
        (
            {"staleness_threshold": 0.5, "on_weight_update": "interrupt", "on_max_lag": "drop", "max_lag": 1},
            ResumeRule(mixes_versions=True, max_lag=0),
        ),
    ],
)
def test_the_rule_of_an_experiment(settings: dict[str, Any], rule: ResumeRule) -> None:
    assert resume_rule(AsynchronyConfig(**settings)) == rule
