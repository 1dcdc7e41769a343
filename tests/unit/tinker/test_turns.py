"""Whose turn it is."""

from flotilla.shared.tinker.turns import Turns


def taken(turns: Turns, costs: dict[str, float], count: int) -> list[str]:
    found = []
    for _ in range(count):
        owner = turns.next(list(costs))
        assert owner is not None
        turns.uses(owner, costs[owner])
        found.append(owner)
    return found


def test_turns_are_shared_by_what_they_cost() -> None:
    found = taken(Turns(), {"cheap": 1.0, "dear": 4.0}, 100)

    assert found.count("cheap") == 80


def test_who_comes_late_has_saved_up_nothing_and_owes_nothing() -> None:
    turns = Turns()
    taken(turns, {"early": 1.0}, 1000)

    found = taken(turns, {"early": 1.0, "late": 1.0}, 10)

    assert found.count("late") == 5


def test_nobody_waits_and_nobody_has_a_turn() -> None:
    assert Turns().next([]) is None
