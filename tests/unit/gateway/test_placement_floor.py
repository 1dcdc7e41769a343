"""A floor of rollouts whose machines are not taken away: got first, given up to nobody, and missed by name."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.placement import WhyLeave, place
from flotilla.services.gateway.scheduler.quota import why_below_floor
from flotilla.shared.config.sections.resources import RolloutQuotaConfig
from flotilla.shared.schemas.service import ServiceKind as Kind


def demand(name: str, *, floor: int = 0, least: int = 1, most: int | None = None, is_placed: bool = True) -> Demand:
    rollouts = RolloutQuotaConfig(min=least, max=most, on_demand=floor)
    return Demand(name, {Kind.ROLLOUT: rollouts}, is_placed)


def rollouts(*names: str, by: str | None = None, devices: int = 0) -> list[Candidate]:
    return [
        Candidate(
            name,
            Kind.ROLLOUT,
            by,
            is_spot=name.startswith("spot"),
            devices=frozenset(f"{name}/{number}" for number in range(devices)),
        )
        for name in names
    ]


@pytest.mark.parametrize("devices", [0, 1])
def test_an_experiment_gets_its_floor_first_and_leaves_others_theirs(devices: int) -> None:
    demands = [demand("plain", is_placed=False), demand("safe", floor=1, is_placed=False)]

    placed = place(demands, rollouts("kept", "spot-1", devices=devices))

    assert placed.assigned == {"spot-1": "plain", "kept": "safe"}


def test_without_floors_services_are_given_as_they_registered() -> None:
    placed = place([demand("a", is_placed=False), demand("b", is_placed=False)], rollouts("spot-1", "kept", "spot-2"))

    assert placed.assigned == {"spot-1": "a", "kept": "b", "spot-2": "a"}


def test_a_floor_is_given_up_to_nobody_though_it_is_above_the_minimum() -> None:
    first, second = demand("first", floor=2, least=1), demand("second", least=2, is_placed=False)

    placed = place([first, second], rollouts("kept-1", "kept-2", "spot-1", by="first"))
    assert placed.leaving == {} and placed.lacking == {"second": {Kind.ROLLOUT: 1}}

    placed = place(
        [first, replace(second, quotas=demand("", least=1).quotas)], rollouts("kept-1", "kept-2", "spot-1", by="first")
    )
    assert placed.leaving == {"spot-1": WhyLeave.MINIMUM}


def test_the_newest_ones_above_the_floor_leave_and_spot_ones_first() -> None:
    held = rollouts("kept-1", "spot-1", "kept-2", "kept-3", by="first")

    placed = place([demand("first", floor=1), demand("second", least=3, is_placed=False)], held)

    assert set(placed.leaving) == {"kept-3", "kept-2", "spot-1"}


def test_a_paused_experiment_lends_all_but_its_floor() -> None:
    paused = replace(demand("first", floor=1), is_paused=True)

    placed = place(
        [paused, demand("second")], [*rollouts("spot-1", "kept", by="first"), *rollouts("spot-2", by="second")]
    )

    assert set(placed.leaving) == {"spot-1"}


def test_a_floor_takes_the_place_of_a_spot_rollout_where_a_maximum_leaves_none() -> None:
    candidates = [*rollouts("spot-1", "spot-2", by="first"), *rollouts("kept")]

    placed = place([demand("first", floor=1, most=2)], candidates)
    assert placed.leaving == {"spot-2": WhyLeave.FLOOR} and placed.assigned == {}

    after = [*rollouts("spot-1", by="first"), *rollouts("kept", "spot-2")]
    placed = place([demand("first", floor=1, most=2)], after)
    assert placed.assigned == {"kept": "first"} and placed.leaving == {}


@pytest.mark.parametrize(
    ("floor", "names", "said"),
    [
        (0, ["spot-1"], None),
        (1, ["kept"], None),
        (1, ["spot-1"], "0 of 1 on-demand rollout is there"),
        (2, ["kept", "spot-1"], "1 of 2 on-demand rollouts is there"),
        (3, ["spot-1"], "0 of 3 on-demand rollouts are there"),
    ],
)
def test_what_a_floor_lacks_is_said(floor: int, names: list[str], said: str | None) -> None:
    found = why_below_floor(demand("first", floor=floor), rollouts(*names, by="first"))

    assert found is said is None or (found or "").startswith(said or "none")


def test_one_that_was_asked_to_leave_is_none_of_the_floor() -> None:
    held = [replace(each, is_leaving=True) for each in rollouts("kept", by="first")]

    assert why_below_floor(demand("first", floor=1), held) is not None
    assert why_below_floor(demand("first", floor=1, is_placed=False), held) is None


def test_a_floor_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValidationError, match="on_demand 3 is above max 2: raise max, or lower on_demand"):
        RolloutQuotaConfig(max=2, on_demand=3)
