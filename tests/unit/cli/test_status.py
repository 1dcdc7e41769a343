"""`flotilla status` fits into a terminal: sentences are lines below the tables."""

from datetime import UTC, datetime

from flotilla.cli.commands.status import remarks

CAUSE = "waiting for 1 trainer to register or to fall free: first-1 has 1 trainer"
TOLD = "the SGLang server ended by exit code 1; last lines: torch.OutOfMemoryError: CUDA out of memory"
FINDING = {"check": "never_right", "since_step": 4}


def test_a_service_that_does_not_work_is_told_with_what_ended_it() -> None:
    cause = "the SGLang server ended by signal SIGKILL; last lines: [2026] Prefill batch | [2026] Prefill batch"
    services = [
        {"id": "rollout-1", "failure": {"component": "rollout engine", "cause": cause, "fatal": False}},
        {"id": "rollout-2", "failure": None},
        {"id": "rollout-3", "failure": {"component": "rollout engine", "cause": TOLD, "fatal": False}},
    ]

    assert remarks([], [], services) == [
        "failing  rollout-1: rollout engine: the SGLang server ended by signal SIGKILL",
        f"failing  rollout-3: rollout engine: {TOLD}",
    ]


def test_what_is_wrong_and_what_is_waited_for_is_said_once() -> None:
    experiments = [
        {"id": "first-1", "problem": None, "health": [FINDING], "state": "running"},
        {"id": "second-2", "problem": {"component": "scheduler", "cause": CAUSE}, "health": [], "state": "starting"},
    ]
    shares = [
        {"experiment_id": "first-1", "waiting": "waiting for 1 rollout to register"},
        {"experiment_id": "second-2", "waiting": CAUSE},
    ]

    assert remarks(experiments, shares) == [
        "health   first-1: never_right (since step 4); `flotilla diagnose first-1` tells more",
        f"problem  second-2: scheduler: {CAUSE}",
        "waiting  first-1: waiting for 1 rollout to register",
    ]


def test_what_was_wrong_with_an_experiment_that_ended_long_ago_is_not_said_again() -> None:
    problem = {"component": "trainer", "cause": "out of memory"}
    dead = {
        "id": "old-1",
        "problem": problem,
        "health": [FINDING],
        "state": "failed",
        "updated_at": "2026-03-01T12:00:00Z",
    }
    live = {**dead, "id": "live-2", "state": "paused", "health": []}

    after_an_hour = remarks([dead, live], [], now=datetime(2026, 3, 1, 13, tzinfo=UTC))
    after_two_days = remarks([dead, live], [], now=datetime(2026, 3, 3, 13, tzinfo=UTC))

    assert [line.split()[1] for line in after_an_hour] == ["old-1:", "old-1:", "live-2:"]
    assert after_two_days == ["problem  live-2: trainer: out of memory"]
