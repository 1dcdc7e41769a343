"""A series of a run that is followed takes little memory, and a step that is trained again replaces later ones."""

import tracemalloc

from flotilla.cli.points import Points


def test_points_are_a_sequence_of_tuples() -> None:
    points = Points([(1, 1, 0.5), (2, 3, 0.25)])

    assert len(points) == 2 and points and not Points()
    assert points[-1] == (2, 3, 0.25)
    assert points[-5:] == [(1, 1, 0.5), (2, 3, 0.25)]
    assert points == [(1, 1, 0.5), (2, 3, 0.25)] and points != Points()


def test_a_step_that_is_trained_again_replaces_those_after_it() -> None:
    points = Points((step, step, float(step)) for step in range(1, 5))

    points.put(3, 2, 0.5)

    assert list(points) == [(1, 1, 1.0), (2, 2, 2.0), (3, 2, 0.5)]


def test_a_point_takes_few_bytes() -> None:
    tracemalloc.start()
    try:
        points = Points((step, step, step / 3) for step in range(10_000))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert taken < 32 * len(points)
