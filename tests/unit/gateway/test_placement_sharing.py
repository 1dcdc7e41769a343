"""Division of a surplus: by rank, by weight, by largest remainder, and stable."""

from flotilla.services.gateway.scheduler.placement import Share, divide


def share(key: str, weight: float = 1.0, room: int = 99, held: int = 0, rank: int = 0) -> Share:
    return Share(key, (rank,), weight, room, held)


def test_whole_services_follow_the_largest_remainder() -> None:
    # 2:1 of two is 1.33 and 0.67: the larger remainder is the smaller share's.
    assert divide(2, [share("a", 2.0), share("b", 1.0)]) == {"a": 1, "b": 1}
    assert divide(3, [share("a", 2.0), share("b", 1.0)]) == {"a": 2, "b": 1}


def test_who_has_a_service_keeps_it_where_the_division_is_a_tie() -> None:
    assert divide(1, [share("a"), share("b", held=1)]) == {"a": 0, "b": 1}
    assert divide(3, [share("a", held=1), share("b", held=2)]) == {"a": 1, "b": 2}
    assert divide(1, [share("a"), share("b")]) == {"a": 1, "b": 0}, "else who came first"


def test_what_one_has_no_room_for_goes_to_the_others() -> None:
    assert divide(6, [share("a", 5.0, room=1), share("b"), share("c")]) == {"a": 1, "b": 3, "c": 2}
    assert divide(6, [share("a", room=1), share("b", room=2)]) == {"a": 1, "b": 2}


def test_a_lower_rank_takes_all_that_it_has_room_for_first() -> None:
    assert divide(4, [share("late", rank=1), share("early", room=3)]) == {"early": 3, "late": 1}


def test_nothing_is_divided_among_nobody() -> None:
    assert divide(3, []) == {}
    assert divide(0, [share("a")]) == {"a": 0}
