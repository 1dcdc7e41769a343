"""`flotilla status` fits into a terminal: sentences are lines below the tables."""

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
        {"id": "first-1", "problem": None, "health": [FINDING]},
        {"id": "second-2", "problem": {"component": "scheduler", "cause": CAUSE}, "health": []},
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
