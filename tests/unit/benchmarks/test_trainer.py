"""Which rounds of the trainer's benchmark are made and counted."""

from benchmarks.trainer import alternate


class Alternating:
    """Two updates, the second three times as long, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def update(self, name: str, seconds: float) -> float:
        self.now += seconds
        self.order.append(name)
        return seconds

    def run(self, rounds: int, end: float) -> dict[str, list[float]]:
        runs = {"short": lambda: self.update("short", 1.0), "long": lambda: self.update("long", 3.0)}
        return alternate(runs, rounds=rounds, end=end, clock=lambda: self.now)


def test_the_first_round_is_not_counted_and_the_order_is_turned_round() -> None:
    made = Alternating()

    seconds = made.run(rounds=2, end=100.0)

    assert seconds == {"short": [1.0, 1.0], "long": [3.0, 3.0]}
    assert made.order == ["long", "short", "short", "long", "long", "short"]


def test_no_round_begins_that_would_end_too_late() -> None:
    made = Alternating()

    seconds = made.run(rounds=10, end=15.0)

    assert len(seconds["short"]) == 2
    assert made.now == 12.0


def test_one_round_is_counted_however_late_it_is() -> None:
    assert Alternating().run(rounds=10, end=0.0) == {"short": [1.0], "long": [3.0]}
