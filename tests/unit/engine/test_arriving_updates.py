"""Weights that are read while they arrive take effect only when they are whole, right, and asked for."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.engines.decoders.arrival import Arrival
from services.rollout.engines.embedded.updates import Update, UpdateQueue
from shared.config.asynchrony import OnWeightUpdate
from shared.errors import WeightTransferFailed

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
                self.spare.append(f"{image} {end} {'whole' if arrival is None else arrival.transfer}")
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


def test_an_image_is_read_as_it_arrives(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    updates.expect(IMAGE, 1, 7)
    updates.note_arrived(7, 25)
    decoder.wait_until_read(2)
    updates.note_arrived(7, 30)
    decoder.wait_until_read(3)
    assert decoder.serving == []

    updates.prepare(IMAGE, 1, 7)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 7", "image 20 7", "image 30 7"]


def test_a_switch_reads_anew_what_was_never_found_right(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    updates.expect(IMAGE, 1, 7)
    updates.note_arrived(7, 30)
    decoder.wait_until_read(3)

    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


@pytest.mark.parametrize("is_told", [True, False], ids=["forgotten", "replaced"])
def test_a_failed_transfer_leaves_nothing_behind(
    updates: UpdateQueue, decoder: PiecewiseDecoder, is_told: bool
) -> None:
    updates.expect(IMAGE, 1, 7)
    updates.note_arrived(7, 20)
    decoder.wait_until_read(2)
    if is_told:
        updates.forget(7)

    # The next attempt, into the same file.
    updates.expect(IMAGE, 1, 8)
    updates.note_arrived(7, 30)
    updates.note_right(7)
    updates.note_arrived(8, 30)
    updates.prepare(IMAGE, 1, 8)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 8", "image 20 8", "image 30 8"]


def test_an_image_that_came_another_way_replaces_the_one_that_is_expected(
    updates: UpdateQueue, decoder: PiecewiseDecoder
) -> None:
    updates.expect(IMAGE, 1, 7)
    updates.note_arrived(7, 20)
    decoder.wait_until_read(2)

    updates.prepare(IMAGE, 1)
    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_an_update_that_is_due_goes_before_one_that_arrives(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    updates.expect(IMAGE, 2, 7)
    updates.note_arrived(7, 20)
    decoder.wait_until_read(2)

    switch_to(updates, OTHER, 1)
    assert decoder.serving == ["other 10 whole", "other 20 whole", "other 30 whole"]

    updates.note_arrived(7, 30)
    updates.prepare(IMAGE, 2, 7)
    switch_to(updates, IMAGE, 2)
    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_nothing_is_expected_while_an_update_is_due(updates: UpdateQueue, decoder: PiecewiseDecoder) -> None:
    updates.add(Update(1, OTHER, 1, OnWeightUpdate.DRAIN))
    updates.stage_first()

    updates.expect(IMAGE, 2, 7)
    updates.note_arrived(7, 30)
    updates.apply_first()

    assert decoder.serving == ["other 10 whole", "other 20 whole", "other 30 whole"]


def test_without_overlap_nothing_is_read_before_the_switch(decoder: PiecewiseDecoder) -> None:
    updates = UpdateQueue(decoder)  # type: ignore[arg-type]
    updates.expect(IMAGE, 1, 7)
    updates.note_arrived(7, 30)
    updates.prepare(IMAGE, 1, 7)
    assert decoder.spare == []

    switch_to(updates, IMAGE, 1)

    assert decoder.serving == ["image 10 whole", "image 20 whole", "image 30 whole"]


def test_an_arrival_ends_one_way_only() -> None:
    right, given_up = Arrival(1), Arrival(2)
    right.complete()
    right.give_up()
    given_up.give_up()
    given_up.complete()

    right.wait_until_right()
    right.wait_for(1 << 40)
    for wait in (given_up.wait_until_right, lambda: given_up.wait_for(0)):
        with pytest.raises(WeightTransferFailed, match="given up"):
            wait()


def test_a_transfer_that_nobody_speaks_of_is_given_up() -> None:
    silent = Arrival(1, silence_seconds=0.02)
    silent.advance(10)
    silent.wait_for(10)

    with pytest.raises(WeightTransferFailed, match=r"nothing was heard of the weights for 0\.02 s"):
        silent.wait_for(11)
