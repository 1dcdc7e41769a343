"""A grader process that fails in every way over HTTP, at once and by callbacks through a gateway: no false reward."""

import pytest

from tests.integration.reward.faulty_grader import AT_ONCE, BY_CALLBACK
from tests.integration.reward.grading_run import Outcome, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MOST_FAULTS = 0.6
"""Of the calls: so that each kind comes in a few seconds."""
HARMLESS = {
    "right: 200", "late: 200", "duplicate: 200", "forged: 401", "forged_address: 401",
    "replayed: 401", "conflicting: 409",
}  # fmt: skip


def check(outcome: Outcome, kinds: tuple[str, ...]) -> None:
    assert outcome.trained > 0
    assert outcome.false_rewards == 0
    assert outcome.ledger_is_balanced
    assert len(outcome.faults) > len(kinds) / 2, outcome.faults


async def test_no_fault_of_an_answer_is_a_reward() -> None:
    outcome = await measure(MOST_FAULTS, 6, is_later=False)

    check(outcome, AT_ONCE)


async def test_no_forged_late_or_replayed_callback_is_a_reward() -> None:
    outcome = await measure(MOST_FAULTS, 6, is_later=True)

    check(outcome, BY_CALLBACK)
    # On a crowded machine 410 may be of any kind, and the fleet's clock begin later than the grader's, so that what is
    # late for the one is not for the other; its content is right. What is false is never taken.
    assert {each for each in outcome.statuses if not each.endswith("410")} <= HARMLESS, outcome.statuses
