from services.gateway.scheduler.placement import Candidate, Demand, describe_lack, needs_of, place
from shared.schemas.service import ServiceKind as Kind
from tests.unit.gateway.builders import a_spec

NEEDS = {Kind.TRAINER: 1, Kind.ROLLOUT: 2, Kind.REWARD: 1}


def candidates(**counts: int) -> list[Candidate]:
    return [Candidate(f"{kind}{n}", Kind(kind)) for kind, count in counts.items() for n in range(count)]


def test_an_experiment_gets_all_that_it_needs_in_the_order_of_registration() -> None:
    placement = place([Demand("a", NEEDS, False)], candidates(trainer=2, rollout=2, reward=1))

    assert placement.assigned == {"trainer0": "a", "rollout0": "a", "rollout1": "a", "reward0": "a"}
    assert placement.lacking == {}


def test_an_experiment_that_lacks_something_gets_nothing_and_is_told_what() -> None:
    placement = place([Demand("a", NEEDS, False)], candidates(rollout=1, reward=1))

    assert placement.assigned == {}
    assert placement.lacking == {"a": {Kind.TRAINER: 1, Kind.ROLLOUT: 1}}
    assert describe_lack(placement.lacking["a"]) == "waiting for 1 trainer and 1 rollout to register"


def test_first_come_first_served() -> None:
    demands = [Demand("first", NEEDS, False), Demand("second", NEEDS, False)]

    placement = place(demands, candidates(trainer=1, rollout=2, reward=1))

    assert set(placement.assigned.values()) == {"first"}
    assert set(placement.lacking) == {"second"}


def test_a_later_experiment_starts_when_an_earlier_one_cannot() -> None:
    demands = [Demand("greedy", {**NEEDS, Kind.ROLLOUT: 9}, False), Demand("modest", NEEDS, False)]

    placement = place(demands, candidates(trainer=1, rollout=3, reward=1))

    assert set(placement.assigned.values()) == {"modest"}


def test_surplus_rollouts_join_the_poorest_running_experiment() -> None:
    held = [Candidate("t", Kind.TRAINER, "a"), Candidate("r", Kind.ROLLOUT, "a"), Candidate("w", Kind.REWARD, "a")]
    needs = {**NEEDS, Kind.ROLLOUT: 1}
    others = [Candidate(f"{c.service_id}b", c.kind, "b") for c in held] + [Candidate("x", Kind.ROLLOUT, "b")]

    placement = place([Demand("a", needs, True), Demand("b", needs, True)], [*held, *others, *candidates(rollout=3)])

    assert placement.assigned == {"rollout0": "a", "rollout1": "a", "rollout2": "b"}


def test_rollouts_that_a_waiting_experiment_will_need_are_kept_for_it() -> None:
    held = [Candidate("t", Kind.TRAINER, "a"), Candidate("r", Kind.ROLLOUT, "a"), Candidate("w", Kind.REWARD, "a")]
    demands = [Demand("a", {**NEEDS, Kind.ROLLOUT: 1}, True), Demand("b", NEEDS, False)]

    placement = place(demands, [*held, *candidates(rollout=3)])

    assert placement.assigned == {"rollout2": "a"}


def test_a_lost_trainer_is_replaced_at_once_and_only_then() -> None:
    running = Demand("a", NEEDS, True)
    held = [Candidate("r0", Kind.ROLLOUT, "a"), Candidate("r1", Kind.ROLLOUT, "a"), Candidate("w", Kind.REWARD, "a")]

    assert place([running], held).lacking == {"a": {Kind.TRAINER: 1}}
    assert place([running], [*held, *candidates(trainer=2)]).assigned == {"trainer0": "a"}


def test_a_running_experiment_takes_up_what_there_is_of_what_it_lost() -> None:
    held = [Candidate("t", Kind.TRAINER, "a")]

    placement = place([Demand("a", NEEDS, True)], [*held, *candidates(rollout=1)])

    assert placement.assigned == {"rollout0": "a"}
    assert placement.lacking == {"a": {Kind.ROLLOUT: 1, Kind.REWARD: 1}}


def test_a_sandbox_is_needed_only_by_a_reward_that_runs_code() -> None:
    assert Kind.SANDBOX not in needs_of(a_spec())
    assert needs_of(a_spec(reward={"components": [{"kind": "code"}]}))[Kind.SANDBOX] == 1
