"""Weights that are read while they arrive take effect only when they are whole, right, and asked for."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.embedded.updates import Update, UpdateQueue
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightTransferFailed

IMAGE, OTHER = Path("image"), Path("other")
PIECES = (10, 20, 30)
SECONDS = 5.0


class PiecewiseDecoder:
    """Reads an image in three pieces; what serves is the list of what was read for it."""

    def __init__(self) -> None:
        self.spare: list[str] = []
        self.serving: list[str] = []
        self.has_read = threading.Condition()

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        with self.has_read:
            self.spare = []
        for end in PIECES:
            if arrival is not None:
                arrival.wait_for(end)
            with self.has_read:
                self.spare.append(f"{image} {end} {'whole' if arrival is None else 'arriving'}")
                self.has_read.notify_all()

    def switch(self) -> None:
        self.serving, self.spare = self.spare, self.serving

    def wait_until_read(self, num_pieces: int) -> None:
        with self.has_read:
            assert self.has_read.wait_for(lambda: len(self.spare) == num_pieces, SECONDS)


@pytest.fixture
def decoder() -> PiecewiseDecoder:
    return PiecewiseDecoder()


@pytest.fixture
def updates(decoder: PiecewiseDecoder) -> Iterator[UpdateQueue]:
    queue = UpdateQueue(decoder, overlap=True)  # type: ignore[arg-type]
    yield queue
    queue.clear()


def switch_to(updates: UpdateQueue, image: Path, version: int) -> None:
    updates.add(Update(1, image, version, OnWeightUpdate.CONTINUE))
    update, refused = updates.stage_first()
    assert (update is not None, refused) == (True, [])
    updates.apply_first()


def begin(updates: UpdateQueue, image: Path, version: int, bytes_arrived: int = 0) -> Arrival:
    arrival = Arrival(image, version)
    updates.begin(arrival)
    arrival.advance(bytes_arrived)
    return arrival


def complete(updates: UpdateQueue, arrival: Arrival) -> None:
    arrival.complete()
    updates.complete(arrival)


def test_an_image_is_read_as_it_arrives(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    arrival = begin(updates, IMAGE, 1, 25)
    decoder.wait_until_read(2)
    arrival.advance(30)
    decoder.wait_until_read(3)
    assert decoder.serving == []

    complete(updates, arrival)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 arriving", "image 20 arriving", "image 30 arriving"]


def test_a_switch_reads_again_what_was_never_found_right(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    begin(updates, IMAGE, 1, 30)
    decoder.wait_until_read(3)

    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


@pytest.mark.parametrize("is_told", [True, False], ids=["aborted", "replaced"])
def test_a_failed_transfer_leaves_nothing_behind(
    updates: UpdateQueue, decoder: PiecewiseDecoder, is_told: bool
) -> None:
    failed = begin(updates, IMAGE, 1, 20)
    decoder.wait_until_read(2)
    if is_told:
        failed.abort("connection closed by peer")

    # The next attempt, into the same file.
    again = begin(updates, IMAGE, 1)
    failed.advance(30)
    failed.complete()
    decoder.wait_until_read(0)
    again.advance(30)
    complete(updates, again)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 arriving", "image 20 arriving", "image 30 arriving"]


def test_an_image_that_came_another_way_replaces_the_one_that_is_expected(
    updates: UpdateQueue, decoder: PiecewiseDecoder
) -> None:
    begin(updates, IMAGE, 1, 20)
    decoder.wait_until_read(2)

    other = Arrival(IMAGE, 1)
    other.complete()
    updates.begin(other)
    updates.complete(other)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_an_update_that_is_due_goes_before_one_that_arrives(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    arrival = begin(updates, IMAGE, 2, 20)
    decoder.wait_until_read(2)

    switch_to(updates, OTHER, 1)
    assert decoder.serving == ["other 10 whole", "other 20 whole", "other 30 whole"]

    arrival.advance(30)
    complete(updates, arrival)
    switch_to(updates, IMAGE, 2)
    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_nothing_is_expected_while_an_update_is_due(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    updates.add(Update(1, OTHER, 1, OnWeightUpdate.DRAIN))
    updates.stage_first()

    begin(updates, IMAGE, 2, 30)
    updates.apply_first()

    assert decoder.serving == ["other 10 whole", "other 20 whole", "other 30 whole"]


def test_without_overlap_nothing_is_read_before_the_switch(decoder: PiecewiseDecoder) -> None:
    updates = UpdateQueue(decoder)  # type: ignore[arg-type]
    complete(updates, begin(updates, IMAGE, 1, 30))
    assert decoder.spare == []

    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_an_arrival_ends_one_way_only() -> None:
    right, aborted = Arrival(IMAGE, 1), Arrival(IMAGE, 2)
    right.complete()
    right.abort("too late")
    aborted.abort("connection closed by peer")
    aborted.abort("too late")
    aborted.complete()

    right.wait_until_right()
    right.wait_for(1 << 40)
    for wait in (aborted.wait_until_right, lambda: aborted.wait_for(0)):
        with pytest.raises(WeightTransferFailed, match="was aborted: connection closed by peer"):
            wait()


def test_a_transfer_that_nobody_speaks_of_is_given_up() -> None:
    silent = Arrival(IMAGE, 1, silence_seconds=0.02)
    silent.advance(10)
    silent.wait_for(10)

    with pytest.raises(WeightTransferFailed, match=r"nothing was heard of the weights for 0\.02 s"):
        silent.wait_for(11)
