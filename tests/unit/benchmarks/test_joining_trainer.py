"""What the benchmark of a joining rollout says of its rounds."""

from benchmarks.joining_trainer import Measured, report


def test_a_step_is_held_against_that_of_its_own_round() -> None:
    rounds = [
        [Measured("alone", 10.0), Measured("copy", 10.5, 2.0), Measured("pull", 11.0, 4.0, 3.0)],
        [Measured("pull", 21.0, 3.0, 2.0), Measured("copy", 20.0, 3.0), Measured("alone", 20.0)],
        [Measured("alone", 10.0), Measured("copy", 10.1, 4.0), Measured("pull", 10.0, 6.0, 5.5)],
    ]

    assert report(rounds, ["copy", "pull"]) == [
        "step alone: 10.00 s (10.00 to 20.00)",
        "copy: 3.00 (2.00 to 4.00) s; step grew by 1.0% (0.0% to 5.0%)",
        "pull: 4.00 (3.00 to 6.00) s, serves after 3.00 s, 1.50 (1.00 to 2.00) of the copy's time; "
        "step grew by 5.0% (0.0% to 10.0%)",
    ]
