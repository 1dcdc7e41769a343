"""`flotilla status` fits into a terminal: sentences are lines below the tables."""

from flotilla.cli.commands.status import remarks

CAUSE = "waiting for 1 trainer to register or to fall free: first-1 has 1 trainer"
FINDING = {"check": "never_right", "since_step": 4}


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
