"""A floor of rollouts whose machines are not taken away: got first, given up to nobody, and missed by name."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.placement import WhyLeave, place
from flotilla.services.gateway.scheduler.quota import why_below_floor
from flotilla.shared.config.rules.devices import DeviceNeed
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


DEMANDING = {"gpu": {"needs": {Kind.ROLLOUT: DeviceNeed(1, is_used=True)}}, "server": {"engine": "sglang"}, "cpu": {}}


def able(candidates: list[Candidate]) -> list[Candidate]:
    return [replace(each, engines=frozenset({"sglang"})) for each in candidates]


@pytest.mark.parametrize("use", DEMANDING)
@pytest.mark.parametrize(
    ("held", "idle", "assigned", "leaving"),
    [
        (["spot-1", "spot-2"], ["kept"], set(), {"spot-2": WhyLeave.FLOOR}),
        (["spot-1"], ["spot-2", "kept"], {"kept"}, {}),
        ([], ["spot-1", "spot-2", "kept"], {"spot-1", "kept"}, {}),
    ],
)
def test_a_floor_is_one_of_whatever_its_rollouts_need(
    use: str, held: list[str], idle: list[str], assigned: set[str], leaving: dict[str, WhyLeave]
) -> None:
    first = replace(demand("first", floor=1, most=2, is_placed=bool(held)), **DEMANDING[use])  # type: ignore[arg-type]

    placed = place([first], able([*rollouts(*held, by="first", devices=1), *rollouts(*idle, devices=1)]))

    assert set(placed.assigned) == assigned and placed.leaving == leaving


def test_what_a_floor_cannot_have_is_left_to_others() -> None:
    first = replace(demand("first", floor=1, most=2), engine="sglang")
    held = [*rollouts("spot-1", "spot-2", by="first"), *rollouts("spot-3", by="plain")]

    placed = place([first, demand("plain")], able([*held, *rollouts("spot-4")]))

    assert placed.assigned == {"spot-4": "plain"} and placed.leaving == {}


def settled(demands: list[Demand], candidates: list[Candidate]) -> dict[str, set[str]]:
    """Carry placements out until nothing moves; return what each experiment has."""
    for _ in range(12):
        placed = place(demands, candidates)
        after = [
            replace(
                each,
                experiment_id=None
                if each.is_leaving and each.service_id in placed.leaving
                else placed.assigned.get(each.service_id, each.experiment_id),
                is_leaving=each.service_id in placed.leaving,
            )
            for each in candidates
        ]
        after = [replace(each, is_leaving=each.is_leaving and each.experiment_id is not None) for each in after]
        given = {each.experiment_id for each in after}
        demands = [replace(each, is_placed=each.is_placed or each.experiment_id in given) for each in demands]
        if after == candidates:
            return {
                each.experiment_id: {c.service_id for c in candidates if c.experiment_id == each.experiment_id}
                for each in demands
            }
        candidates = after
    raise AssertionError(f"it never comes to rest: {candidates}")


@pytest.mark.parametrize("most", [2, 3, None])
@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("devices", [0, 1])
def test_below_its_floor_an_experiment_gets_what_stays_and_another_its_spot(
    most: int | None, is_placed: bool, devices: int
) -> None:
    demands = [demand("safe", floor=1, most=most), demand("plain", is_placed=is_placed)]
    held = [*rollouts("spot-1", "spot-2", by="safe", devices=devices)]
    held += rollouts("spot-3", by="plain", devices=devices) if is_placed else []

    has = settled(demands, [*held, *rollouts("kept", devices=devices)])

    assert has["safe"] == {"spot-1", "kept"} and has["plain"] == {"spot-2"} | ({"spot-3"} if is_placed else set())


def test_one_idle_service_makes_one_floor_give_up_a_place() -> None:
    demands = [demand("first", floor=1, most=1), demand("second", floor=1, most=1)]

    placed = place(demands, [*rollouts("spot-1", by="first"), *rollouts("spot-2", by="second"), *rollouts("kept")])

    assert placed.leaving == {"spot-1": WhyLeave.FLOOR} and placed.assigned == {}


def test_a_floor_is_before_shares_and_starts_and_after_the_minimums_of_those_that_run() -> None:
    heavy = replace(demand("heavy"), weight=9.0)
    held = [*rollouts("kept-1", by="safe"), *rollouts("spot-1", by="heavy")]
    placed = place([demand("safe", floor=2), heavy], [*held, *rollouts("kept-2")])
    assert placed.assigned == {"kept-2": "safe"}

    placed = place([demand("safe", floor=2), replace(heavy, is_placed=False)], [held[0], *rollouts("kept-2")])
    assert placed.assigned == {"kept-2": "safe"} and placed.lacking == {"heavy": {Kind.ROLLOUT: 1}}

    placed = place([demand("safe", floor=2), heavy], [held[0], *rollouts("kept-2")])
    assert placed.assigned == {"kept-2": "heavy"}


def test_a_paused_experiment_gives_up_nothing_for_its_floor() -> None:
    paused = replace(demand("first", floor=1, most=2), is_paused=True)

    placed = place([paused], [*rollouts("spot-1", "spot-2", by="first"), *rollouts("kept")])

    assert placed.leaving == {} and placed.assigned == {}


@pytest.mark.parametrize(("least", "num_leaving"), [(1, 2), (2, 1), (3, 1)])
def test_a_floor_takes_no_more_places_at_once_than_the_minimum_allows(least: int, num_leaving: int) -> None:
    held = rollouts("spot-1", "spot-2", "spot-3", by="first")

    placed = place([demand("first", floor=2, least=least, most=3)], [*held, *rollouts("kept-1", "kept-2")])

    assert len(placed.leaving) == num_leaving


def test_a_floor_fills_what_a_maximum_leaves_before_it_takes_a_place() -> None:
    held = rollouts("spot-1", "spot-2", by="first")

    placed = place([demand("first", floor=2, least=2, most=3)], [*held, *rollouts("kept-1", "kept-2")])

    assert placed.assigned == {"kept-1": "first"} and placed.leaving == {}
