import pytest

from flotilla.services.gateway.scheduler.demands import Candidate, Demand, engine_to_start, quotas_of
from flotilla.services.gateway.scheduler.placement import WhyLeave, place
from flotilla.services.gateway.scheduler.quota import why_waiting
from flotilla.shared.config.sections.resources import QuotaConfig
from flotilla.shared.schemas.service import ServiceKind as Kind
from tests.unit.gateway.builders import a_spec


def quotas(rollouts: int = 2, most: int | None = None) -> dict[Kind, QuotaConfig]:
    one = QuotaConfig(min=1, max=1)
    return {Kind.TRAINER: one, Kind.ROLLOUT: QuotaConfig(min=rollouts, max=most), Kind.REWARD: one}


def waiting(name: str, rollouts: int = 2, **fields: object) -> Demand:
    return Demand(name, quotas(rollouts), False, **fields)  # type: ignore[arg-type]


def running(name: str, rollouts: int = 1, most: int | None = None, **fields: object) -> Demand:
    return Demand(name, quotas(rollouts, most), True, **fields)  # type: ignore[arg-type]


def idle(**counts: int) -> list[Candidate]:
    return [Candidate(f"{kind}{n}", Kind(kind)) for kind, count in counts.items() for n in range(count)]


def held(by: str, **counts: int) -> list[Candidate]:
    return [Candidate(f"{by}-{kind}{n}", Kind(kind), by) for kind, count in counts.items() for n in range(count)]


def served(by: str, rollouts: int) -> list[Candidate]:
    return held(by, trainer=1, reward=1, rollout=rollouts)


def test_an_experiment_gets_all_that_it_needs_in_the_order_of_registration() -> None:
    placement = place([waiting("a")], idle(trainer=2, rollout=2, reward=1))

    assert placement.assigned == {"trainer0": "a", "rollout0": "a", "rollout1": "a", "reward0": "a"}
    assert placement.lacking == {}


def test_an_experiment_that_lacks_something_gets_nothing_and_is_told_what() -> None:
    placement = place([waiting("a")], idle(rollout=1, reward=1))

    assert placement.assigned == {}
    assert placement.lacking == {"a": {Kind.TRAINER: 1, Kind.ROLLOUT: 1}}


def test_first_come_first_served() -> None:
    placement = place([waiting("first"), waiting("second")], idle(trainer=1, rollout=2, reward=1))

    assert set(placement.assigned.values()) == {"first"}
    assert set(placement.lacking) == {"second"}


def test_a_higher_priority_starts_first() -> None:
    demands = [waiting("first"), waiting("urgent", priority=1)]

    assert set(place(demands, idle(trainer=1, rollout=2, reward=1)).assigned.values()) == {"urgent"}


def test_a_later_experiment_starts_when_an_earlier_one_cannot() -> None:
    placement = place([waiting("greedy", 9), waiting("modest")], idle(trainer=1, rollout=3, reward=1))

    assert set(placement.assigned.values()) == {"modest"}


def test_idle_rollouts_join_those_that_run_by_weight() -> None:
    demands = [running("a"), running("b", weight=3.0)]

    placement = place(demands, [*served("a", 1), *served("b", 1), *idle(rollout=4)])

    assert sorted(placement.assigned.values()) == ["a", "b", "b", "b"]
    assert placement.leaving == {}


def test_nobody_gets_more_than_its_maximum_and_others_take_the_rest() -> None:
    demands = [running("a", most=2), running("b")]

    placement = place(demands, [*served("a", 1), *served("b", 1), *idle(rollout=4)])

    assert sorted(placement.assigned.values()) == ["a", "b", "b", "b"]


def test_surplus_is_taken_back_for_an_experiment_that_can_start_with_it() -> None:
    services = [*served("a", 3), *idle(trainer=1, reward=1)]

    placement = place([running("a"), waiting("b")], services)

    assert placement.leaving == {"a-rollout2": WhyLeave.MINIMUM, "a-rollout1": WhyLeave.MINIMUM}
    assert placement.assigned == {}
    assert placement.coming == {"b": {Kind.ROLLOUT: 2}}
    assert placement.lacking == {}


def test_nothing_is_taken_back_for_an_experiment_that_could_not_start_even_so() -> None:
    placement = place([running("a"), waiting("b", 4)], [*served("a", 3), *idle(trainer=1, reward=1)])

    assert placement.leaving == {}
    assert placement.lacking == {"b": {Kind.ROLLOUT: 2}}


def test_what_is_already_leaving_is_what_leaves() -> None:
    services = [*served("a", 1), Candidate("early", Kind.ROLLOUT, "a", is_leaving=True), *held("a", sandbox=1)]
    services += [Candidate("late", Kind.ROLLOUT, "a"), *idle(trainer=1, reward=1)]

    placement = place([running("a"), waiting("b", 1)], services)

    assert placement.leaving == {"early": WhyLeave.MINIMUM}


def test_who_was_asked_to_leave_stays_when_nobody_needs_it_any_more() -> None:
    services = [*served("a", 1), Candidate("early", Kind.ROLLOUT, "a", is_leaving=True)]

    assert place([running("a")], services).leaving == {}


def test_what_is_on_its_way_is_not_asked_for_twice() -> None:
    services = [*served("a", 2), Candidate("coming", Kind.ROLLOUT, None, is_leaving=True), *idle(trainer=1, reward=1)]

    placement = place([running("a"), waiting("b", 1)], services)

    assert placement.leaving == {}
    assert placement.coming == {"b": {Kind.ROLLOUT: 1}}


def test_no_more_is_asked_for_than_is_missing_beside_what_is_on_its_way() -> None:
    services = [*served("a", 4), Candidate("coming", Kind.ROLLOUT, None, is_leaving=True), *idle(trainer=1, reward=1)]

    placement = place([running("a"), waiting("b", 2)], services)

    # The second will also have a part of the surplus, but is not asked for before it runs: it would only lie idle.
    assert placement.leaving == {"a-rollout3": WhyLeave.MINIMUM}
    assert placement.targets["b"][Kind.ROLLOUT] == 3


def test_what_a_running_experiment_has_lost_is_replaced_before_a_higher_priority_starts() -> None:
    demands = [waiting("urgent", 1, priority=5), running("a", rollouts=2)]

    placement = place(demands, [*served("a", 1), *idle(trainer=1, reward=1, rollout=1)])

    assert placement.assigned == {"rollout0": "a"}
    assert placement.lacking == {"urgent": {Kind.ROLLOUT: 1}}


def test_a_tie_moves_nobody() -> None:
    assert place([running("a"), running("b")], [*served("a", 1), *served("b", 2)]).leaving == {}


def test_what_an_experiment_needs_and_its_trainer_are_never_taken() -> None:
    services = [*held("a", trainer=2, reward=1, rollout=2)]

    placement = place([running("a", rollouts=2), waiting("b", 1, priority=100)], services)

    assert placement.leaving == {}
    assert placement.lacking == {"b": {Kind.TRAINER: 1, Kind.ROLLOUT: 1, Kind.REWARD: 1}}


def test_a_running_experiment_below_its_minimum_gets_the_surplus_of_another() -> None:
    placement = place([running("a"), running("b", rollouts=2)], [*served("a", 2), *served("b", 1)])

    assert placement.leaving == {"a-rollout1": WhyLeave.MINIMUM}


def test_a_higher_priority_takes_all_the_surplus_that_it_can_use() -> None:
    demands = [running("a"), running("urgent", most=3, priority=1)]

    placement = place(demands, [*served("a", 5), *served("urgent", 1)])

    assert list(placement.leaving.values()) == [WhyLeave.SHARE, WhyLeave.SHARE]


def test_a_paused_experiment_lends_its_surplus_only_to_who_can_use_it() -> None:
    services = [*served("paused", 3), *served("b", 1)]
    paused = running("paused", is_paused=True)

    lent = place([paused, running("b")], services).leaving
    kept = place([paused, running("b", most=1)], services).leaving

    assert len(lent) == 2
    assert kept == {}


def test_what_is_above_a_maximum_leaves_though_nobody_wants_it() -> None:
    placement = place([running("a", most=2)], served("a", 4))

    assert placement.leaving == dict.fromkeys(("a-rollout3", "a-rollout2"), WhyLeave.MAXIMUM)


def test_a_lost_trainer_is_replaced_at_once_and_only_then() -> None:
    services = held("a", rollout=2, reward=1)

    assert place([running("a")], services).lacking == {"a": {Kind.TRAINER: 1}}
    assert place([running("a")], [*services, *idle(trainer=2)]).assigned == {"trainer0": "a"}


def test_a_running_experiment_takes_up_what_there_is_of_what_it_lost() -> None:
    placement = place([running("a", rollouts=2)], [*held("a", trainer=1), *idle(rollout=1)])

    assert placement.assigned == {"rollout0": "a"}
    assert placement.lacking == {"a": {Kind.ROLLOUT: 1, Kind.REWARD: 1}}


def test_an_experiment_that_was_only_half_served_when_the_gateway_died_is_completed() -> None:
    placement = place([waiting("a")], [*held("a", rollout=1), *idle(trainer=1, rollout=1, reward=1)])

    assert sorted(placement.assigned) == ["reward0", "rollout0", "trainer0"]


def test_a_sandbox_is_needed_only_by_a_reward_that_runs_code() -> None:
    assert Kind.SANDBOX not in quotas_of(a_spec())
    code = {"components": [{"kind": "code"}]}
    assert quotas_of(a_spec(reward=code))[Kind.SANDBOX] == QuotaConfig(min=1, max=1)
    wanted = {"sandboxes": {"min": 2}, "rewards": {"max": 3}, "rollouts": {"min": 4}}
    found = quotas_of(a_spec(reward=code, resources=wanted))
    assert (found[Kind.SANDBOX].min, found[Kind.REWARD].max, found[Kind.ROLLOUT].min) == (2, 3, 4)


def rollouts(**engines: str) -> list[Candidate]:
    return [Candidate(name, Kind.ROLLOUT, engines=frozenset({"torch", also})) for name, also in engines.items()]


def test_an_experiment_gets_only_rollouts_that_can_start_its_engine() -> None:
    candidates = [*idle(trainer=2, reward=2), *rollouts(plain="torch", able="sglang", other="torch")]
    wanting, any_will_do = waiting("fast", 1, engine="sglang"), waiting("plain", 2)

    placement = place([any_will_do, wanting], candidates)

    assert {each: to for each, to in placement.assigned.items() if each in {"plain", "able", "other"}} == {
        "plain": "plain",
        "other": "plain",
        "able": "fast",
    }


def test_an_experiment_without_a_rollout_for_its_engine_waits_and_takes_nothing() -> None:
    candidates = [*idle(trainer=1, reward=1), *rollouts(plain="torch")]

    placement = place([waiting("fast", 1, engine="sglang")], candidates)

    assert placement.assigned == {}
    assert placement.lacking == {"fast": {Kind.ROLLOUT: 1}}
    why = why_waiting("fast", placement, [waiting("fast", 1, engine="sglang")], candidates)
    assert why == "waiting for 1 rollout with an interpreter for sglang to register"


def test_a_rollout_that_can_start_another_engine_works_for_anybody_until_that_is_asked_for() -> None:
    able = rollouts(able="sglang")

    assert "able" in place([waiting("plain", 1)], [*idle(trainer=1, reward=1), *able]).assigned
    busy = [Candidate("able", Kind.ROLLOUT, "plain", engines=frozenset({"torch", "sglang"}))]
    placement = place([running("plain"), waiting("fast", 1, engine="sglang")], [*served("plain", 0), *busy])
    assert placement.leaving == {}
    assert placement.lacking["fast"][Kind.ROLLOUT] == 1


@pytest.mark.parametrize(
    ("url", "most"),
    [
        (None, None),
        ("http://127.0.0.1:3", None),
        ("http://[::1]:3", None),
        ("http://localhost", None),
        ("http://10.0.0.5:3", 1),
        ("http://sglang.example.com:3", 1),
    ],
)
def test_a_server_at_an_address_is_for_one_rollout_but_each_machine_may_have_one(
    url: str | None, most: int | None
) -> None:
    spec = a_spec(rollout={"engine": {"kind": "sglang", "url": url}})

    assert quotas_of(spec)[Kind.ROLLOUT].max == most


def test_an_engine_that_runs_elsewhere_needs_no_rollout_that_can_start_it() -> None:
    attached = {"engine": {"kind": "sglang", "url": "http://127.0.0.1:30000"}}

    assert engine_to_start(a_spec(rollout={"engine": {"kind": "sglang"}})) == "sglang"
    assert engine_to_start(a_spec(rollout=attached)) is None
    assert engine_to_start(a_spec()) is None
