"""A record of routed experts arrives as it was made, and one that is not what it says is refused with the reason."""

import zlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from flotilla.shared.schemas.routing import RoutedExperts, RoutedSpan, RoutingSizes, joined, laid_out, span_behind
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.streams.codec import decode_group, encode_body, encode_grades
from flotilla.shared.streams.partials import within
from flotilla.shared.testing.builders import a_task, a_trajectory


def some_ids(tokens: int = 6, layers: int = 3, top_k: int = 2, experts: int = 8, seed: int = 0) -> Any:
    """Draw distinct experts for each token and layer."""
    scores = np.random.default_rng(seed).random((tokens, layers, experts))
    return scores.argsort(-1)[..., :top_k]


def a_routed(tokens: int = 5, **fields: Any) -> Trajectory:
    made = a_trajectory(prompt_tokens=2, sampled_tokens=tokens - 2, **fields)
    return replace(made, experts=RoutedExperts.of(some_ids(tokens - 1), 8))


@pytest.mark.parametrize(("experts", "dtype"), [(8, "u1"), (256, "u1"), (257, "<u2"), (5000, "<u2")])
def test_ids_are_kept_in_the_smallest_type_that_holds_them(experts: int, dtype: str) -> None:
    ids = some_ids(experts=experts)

    found = RoutedExperts.from_wire(msgpack.unpackb(msgpack.packb(RoutedExperts.of(ids, experts).to_wire())))

    assert found.sizes == RoutingSizes(3, 2, experts)
    assert found.ids().dtype == np.dtype(dtype)
    assert found.ids().tolist() == ids.tolist()
    assert found.raw_bytes == ids.size * np.dtype(dtype).itemsize


def test_a_trajectory_takes_its_record_through_streams_and_keeps_it_when_it_is_graded() -> None:
    group = Group(a_task(3, group_size=1), (a_routed(),))

    [found] = decode_group(encode_body(group), encode_grades(group)).trajectories

    assert found.experts is not None
    assert found.experts.ids().tolist() == some_ids(4).tolist()
    graded = found.graded(found.status, found.reward)
    assert graded.experts is found.experts
    assert graded.has_sampled_of(found)
    assert not found.has_sampled_of(replace(found, experts=None))


@pytest.mark.parametrize("tokens", [0, 3, 5])
def test_a_record_of_another_length_than_the_trajectorys_is_refused(tokens: int) -> None:
    made = a_routed()
    wire = made.to_wire() | {"experts": RoutedExperts.of(some_ids(tokens), 8).to_wire()}

    with pytest.raises(ValueError, match=f"routed experts are of {tokens} tokens, a trajectory of 5 has 4"):
        Trajectory.from_wire(wire)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (4, None, "four sizes and bytes"),
        (4, b"\x00" * 5000, "5000 bytes compressed, for 36"),
        (1, 0, "impossible sizes"),
        (1, -3, "impossible sizes"),
        (1, True, "impossible sizes"),
        (1, "3", "impossible sizes"),
        (2, 9, "impossible sizes"),
        (2, 0, "impossible sizes"),
        (3, 1 << 20, "impossible sizes"),
        (0, -1, "impossible sizes"),
        (0, 6.0, "impossible sizes"),
        (0, 1 << 40, "more than"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_uncompressed(place: int, value: Any, why: str) -> None:
    wire = RoutedExperts.of(some_ids(), 8).to_wire()
    wire[place] = value

    with pytest.raises(ValueError, match=why):
        RoutedExperts.from_wire(wire)


@pytest.mark.parametrize("wire", [{}, [], b"", "experts", [1, 2, 3, 4], [1, 1, 1, 1, b"", 1]])
def test_what_is_no_record_is_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="four sizes and bytes"):
        Trajectory.from_wire(a_routed().to_wire() | {"experts": wire})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no zlib", "cannot be uncompressed"),
        (zlib.compress(some_ids().astype(np.uint8).tobytes()[:-1]), "35 bytes, 6 tokens take 36"),
        (zlib.compress(bytes(10_000_000))[:900], "37 bytes, 6 tokens take 36"),
        (zlib.compress(some_ids().astype(np.uint8).tobytes()) + b"more", "36 bytes, 6 tokens take 36"),
        (zlib.compress(np.full(36, 8, np.uint8).tobytes()), "name expert 8, there are 8"),
        (zlib.compress(np.zeros(36, np.uint8).tobytes()), "an expert twice"),
    ],
)
def test_bytes_that_are_not_what_they_say_are_refused(data: bytes, why: str) -> None:
    found = RoutedExperts(6, RoutingSizes(3, 2, 8), data)

    with pytest.raises(ValueError, match=why):
        found.ids()


def test_what_is_known_of_first_tokens_stays_and_the_rest_is_put_behind() -> None:
    first, more = some_ids(3), some_ids(6, seed=1)

    found = joined(RoutedExperts.of(first, 8), RoutedExperts.of(more, 8))

    assert found.ids().tolist() == [*first.tolist(), *more[3:].tolist()]
    assert found.part(1, 4).ids().tolist() == found.ids()[1:4].tolist()
    assert joined(found, RoutedExperts.of(first, 8)) is found
    with pytest.raises(ValueError, match="of 6 tokens, 0 to 7 are needed"):
        found.part(0, 7)
    with pytest.raises(ValueError, match="two models"):
        joined(found, RoutedExperts.of(some_ids(9, layers=2), 8))


def test_another_prompt_begins_behind_a_token_that_nobody_read() -> None:
    known, more = RoutedExperts.of(some_ids(3), 8), RoutedExperts.of(some_ids(6, seed=1), 8)

    behind = span_behind(3, more.part(0, 2), 4)
    assert behind is not None
    found = laid_out([RoutedSpan(0, 3, known), behind], 6)
    rest = span_behind(6, more, 4)
    assert rest is not None
    longer = laid_out([RoutedSpan(0, 3, known), behind, rest], 10)

    expected = [*some_ids(3).tolist(), some_ids(3)[2].tolist(), *some_ids(6, seed=1).tolist()]
    assert found.ids().tolist() == expected[:6]
    assert longer.ids().tolist() == expected
    assert laid_out([RoutedSpan(0, 6, found), rest], 7).ids().tolist() == expected[:7]
    assert span_behind(10, more, 4) == RoutedSpan(10, 10, more.part(6, 6))
    assert span_behind(3, more, 5) is None
    assert span_behind(0, more, 1) is None
    assert joined(None, more) is more


def test_partials_are_bounded_with_their_records() -> None:
    plain, routed = a_trajectory(prompt_tokens=2, sampled_tokens=3), a_routed()
    assert routed.experts is not None
    room = 9 * 5 + 4 * len(plain.text)

    assert within((plain,), room) == (plain,)
    assert within((routed,), room) == ()
    assert within((routed,), room + len(routed.experts.data)) == (routed,)
