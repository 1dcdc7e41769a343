"""The checksum of an image that arrives in any order: right, and of what was just written without reading it again."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.prefix_checksum import CATCH_UP_BYTES, PrefixChecksum

CHUNK = 1 << 18
NUM_CHUNKS = 40


@pytest.fixture
def image(tmp_path: Path) -> Iterator[WeightImage]:
    with WeightImage.create(NUM_CHUNKS * CHUNK, directory=tmp_path) as made:
        made.view[:] = np.random.default_rng(0).bytes(made.image_bytes)
        yield made


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that is read again."""
    sizes: list[int] = []
    read_at = WeightImage.read_at

    def noted(image: WeightImage, position: int, target: memoryview) -> int:
        sizes.append(len(target))
        return read_at(image, position, target)

    monkeypatch.setattr(WeightImage, "read_at", noted)
    return sizes


def arrive(checksum: PrefixChecksum, image: WeightImage, start: int, chunks: range) -> None:
    """Tell of chunks, in turn, of a range that starts at a chunk."""
    for number in chunks:
        stop = (number + 1) * CHUNK
        checksum.follow(image, range(start * CHUNK, stop), image.view[stop - CHUNK : stop])


def test_what_arrives_in_order_is_not_read(image: WeightImage, read: list[int]) -> None:
    checksum = PrefixChecksum(threading.Semaphore())

    arrive(checksum, image, 0, range(NUM_CHUNKS))

    assert checksum.finish(image) == image.checksum()
    assert read == []


def test_what_arrived_ahead_of_its_turn_is_caught_up_with(image: WeightImage, read: list[int]) -> None:
    checksum, ahead = PrefixChecksum(threading.Semaphore()), NUM_CHUNKS // 2
    assert CATCH_UP_BYTES > CHUNK

    arrive(checksum, image, 10, range(10, ahead))
    arrive(checksum, image, 0, range(10))
    arrive(checksum, image, 10, range(ahead, NUM_CHUNKS))

    assert checksum.finish(image) == image.checksum()
    assert (ahead - 10) * CHUNK <= sum(read) < (NUM_CHUNKS - 10) * CHUNK


async def test_whoever_writes_a_later_range_sums_an_earlier_one_that_is_whole(
    image: WeightImage, read: list[int]
) -> None:
    checksum = PrefixChecksum(threading.Semaphore())

    checksum.advance(image, 20 * CHUNK)  # its own thread does not begin before this test pauses
    arrive(checksum, image, 30, range(30, NUM_CHUNKS))
    checksum.abandon()

    assert sum(read) == 20 * CHUNK == checksum.num_summed
    assert checksum.finish(image) == image.checksum()


def test_what_lies_beyond_a_gap_waits_for_it(image: WeightImage, read: list[int]) -> None:
    checksum = PrefixChecksum(threading.Semaphore())

    arrive(checksum, image, 0, range(10))
    arrive(checksum, image, 11, range(11, NUM_CHUNKS))

    assert read == []
    assert checksum.finish(image) == image.checksum()
