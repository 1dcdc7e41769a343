"""`flotilla status` fits into a terminal: sentences are lines below the tables."""

from datetime import UTC, datetime
from typing import Any

import pytest

from flotilla.cli.commands.status import ServiceRow, remarks
from flotilla.shared.schemas.experiment import ExperimentShare, ExperimentState, Problem
from flotilla.shared.schemas.health import HealthFinding
from flotilla.shared.schemas.service import Failure
from tests.unit.cli.test_progress import a_view

CAUSE = "waiting for 1 trainer to register or to fall free: first-1 has 1 trainer"
TOLD = "the SGLang server ended by exit code 1; last lines: torch.OutOfMemoryError: CUDA out of memory"
FINDING = HealthFinding(
    check="never_right",
    component="reward",
    seen="all rewards are 0",
    advice="look at the grader",
    since_step=4,
    at="now",
)


def a_row(service_id: str, cause: str | None = None) -> ServiceRow:
    return ServiceRow(
        id=service_id,
        kind="rollout",
        pid=1,
        address="http://127.0.0.1:9000",
        state="running",
        experiment=None,
        leaving=None,
        policy_version=None,
        devices="cpu",
        lease_expires_in_seconds=10.0,
        failure=None if cause is None else Failure(component="rollout engine", cause=cause, fatal=False),
    )


def a_share(experiment_id: str, waiting: str) -> ExperimentShare:
    facts: dict[str, Any] = {"name": "trial", "state": ExperimentState.STARTING, "weight": 1.0, "priority": 0}
    return ExperimentShare(experiment_id=experiment_id, kinds={}, waiting=waiting, **facts)


@pytest.mark.parametrize(
    ("what", "mark"),
    [
        ("the SGLang server ended by signal SIGKILL", "last lines"),
        ("the process of the engine ended with code -9 (SIGKILL, by hand or for memory)", "its last lines"),
    ],
)
def test_a_service_that_does_not_work_is_told_with_what_ended_it(what: str, mark: str) -> None:
    cause = f"{what}; {mark}: [2026] Prefill batch | [2026] Prefill batch"
    services = [a_row("rollout-1", cause), a_row("rollout-2"), a_row("rollout-3", TOLD)]

    assert remarks([], [], services) == [
        f"failing  rollout-1: rollout engine: {what}",
        f"failing  rollout-3: rollout engine: {TOLD}",
    ]


def test_what_is_wrong_and_what_is_waited_for_is_said_once() -> None:
    problem = Problem(component="scheduler", cause=CAUSE, at="now")
    experiments = [
        a_view(id="first-1", health=(FINDING,)),
        a_view(id="second-2", problem=problem, state=ExperimentState.STARTING),
    ]
    shares = [a_share("first-1", "waiting for 1 rollout to register"), a_share("second-2", CAUSE)]

    assert remarks(experiments, shares) == [
        "health   first-1: never_right (since step 4); see `flotilla diagnose first-1`",
        f"problem  second-2: scheduler: {CAUSE}",
        "waiting  first-1: waiting for 1 rollout to register",
    ]


def test_what_is_lent_is_said_with_the_reason() -> None:
    share = a_share("first-1", "").model_copy(update={"lending": "the trainer has its devices: 2 of 4 steps were seen"})

    assert remarks([], [share]) == ["lending  first-1: the trainer has its devices: 2 of 4 steps were seen"]


def test_what_was_wrong_with_an_experiment_that_ended_long_ago_is_not_said_again() -> None:
    problem = Problem(component="trainer", cause="out of memory", at="2026-03-01T12:00:00Z")
    dead = a_view(
        id="old-1", problem=problem, health=(FINDING,), state=ExperimentState.FAILED, updated_at="2026-03-01T12:00:00Z"
    )
    live = dead.model_copy(update={"id": "live-2", "state": ExperimentState.PAUSED, "health": ()})

    after_an_hour = remarks([dead, live], [], now=datetime(2026, 3, 1, 13, tzinfo=UTC))
    after_two_days = remarks([dead, live], [], now=datetime(2026, 3, 3, 13, tzinfo=UTC))

    assert [line.split()[1] for line in after_an_hour] == ["old-1:", "old-1:", "live-2:"]
    assert after_two_days == ["problem  live-2: trainer: out of memory"]
