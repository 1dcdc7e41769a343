"""Bodies in zstd: the same bytes again, and no more of them than a plain body may have."""

import asyncio

import pyarrow
import pytest

from flotilla.services.gateway.tinker.packing import UnpackedBodies, is_packed, pack, takes_packed, unpack
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.request_body import BodyTooLarge

CONTENT = b"tokens and weights " * 1000


def test_what_was_packed_is_the_same_unpacked() -> None:
    packed = pack(CONTENT)

    assert len(packed) < len(CONTENT) / 10
    assert unpack(packed, len(CONTENT)) == CONTENT
    assert unpack(packed + packed, 2 * len(CONTENT)) == 2 * CONTENT


def test_a_body_is_unpacked_to_its_bound_and_not_to_its_end() -> None:
    bomb = pack(bytes(1 << 28))
    before = pyarrow.total_allocated_bytes()

    with pytest.raises(BodyTooLarge, match="4096 bytes when unpacked"):
        unpack(bomb, 4096)

    assert len(bomb) < 1 << 14
    assert pyarrow.total_allocated_bytes() == before


@pytest.mark.parametrize("frame", [pack(b""), bytes.fromhex("502a4d1800000000")])
def test_frames_without_content_are_not_read_by_the_thousand(frame: bytes) -> None:
    assert unpack(frame * 64, 1 << 20) == b""
    with pytest.raises(InvalidRequest, match="more than 64 frames"):
        unpack(frame * 65, 1 << 20)


@pytest.mark.parametrize("body", [b"no zstd at all", pack(CONTENT)[:-9], pack(CONTENT) + b"behind it"])
def test_what_is_no_zstd_or_cut_off_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not zstd"):
        unpack(body, 1 << 20)


def test_a_window_that_would_take_gigabytes_is_refused() -> None:
    # Magic number, then a frame of unknown size whose window has 2^31 bytes.
    with pytest.raises(InvalidRequest, match="too much memory"):
        unpack(bytes.fromhex("28b52ffd00a8") + bytes(32), 1 << 20)


def test_other_encodings_are_refused_with_what_is_read() -> None:
    assert [is_packed(each) for each in ("", "identity", "zstd", " ZSTD ")] == [False, False, True, True]
    with pytest.raises(InvalidRequest, match="'gzip' is not read here: zstd, or none"):
        is_packed("gzip")


@pytest.mark.parametrize(
    ("accepts", "expected"),
    [
        ("gzip, deflate, br, zstd", True),
        ("zstd;q=0.5", True),
        ("zstd; q=0", False),
        ("gzip", False),
        ("*", False),
        ("", False),
    ],
)
def test_an_answer_is_packed_for_who_says_that_it_takes_it(accepts: str, expected: bool) -> None:
    assert takes_packed(accepts) is expected


def test_bodies_of_one_owner_do_not_wait_for_anothers() -> None:
    bodies = UnpackedBodies()

    async def hold() -> tuple[bool, bool]:
        async with bodies.of("one"), bodies.of("one"):
            return bodies.of("one").locked(), bodies.of("two").locked()

    assert asyncio.run(hold()) == (True, False)
