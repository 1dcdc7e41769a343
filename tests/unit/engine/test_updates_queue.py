"""Weights are read while the old ones sample, never served before all are read, and never from a file that changed."""

import threading
from pathlib import Path

import pytest

from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.embedded.updates import Update, UpdateQueue
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightsDiverged, WeightTransferFailed

A, B = Path("a"), Path("b")


class SlowDecoder:
    """Reads what the file holds when reading ends."""

    base = None

    def __init__(self) -> None:
        self.files = {A: "one", B: "two"}
        self.spare = self.serving = "old"
        self.reads = 0
        self.has_begun, self.may_finish = threading.Event(), threading.Event()
        self.may_finish.set()
        self.fails = 0

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        assert arrival is None
        self.reads += 1
        content = self.files[image]
        self.has_begun.set()
        assert self.may_finish.wait(2)
        if self.fails:
            self.fails -= 1
            raise WeightTransferFailed("a name is missing")
        self.spare = content

    def switch(self) -> None:
        self.serving, self.spare = self.spare, self.serving


def an_update(image: Path, version: int) -> Update:
    return Update(version, image, version, OnWeightUpdate.CONTINUE)


@pytest.fixture
def decoder() -> SlowDecoder:
    return SlowDecoder()


def a_queue(decoder: SlowDecoder, *, overlap: bool = True) -> UpdateQueue:
    return UpdateQueue(decoder, overlap=overlap)  # type: ignore[arg-type]


def prepare(queue: UpdateQueue, image: Path, version: int) -> None:
    """Announce an image that is whole and right already, as one that was mapped or patched."""
    arrival = Arrival(image, version)
    arrival.complete()
    queue.begin(arrival)
    queue.complete(arrival)


def apply(queue: UpdateQueue) -> list[object]:
    staged, refused = queue.stage_first()
    if staged is not None:
        queue.apply_first()
    return list(refused)


def test_sampling_goes_on_while_an_image_is_read(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    decoder.may_finish.clear()
    queue.add(an_update(A, 1))

    assert queue.stage_first(may_wait=False) == (None, [])
    assert decoder.serving == "old"

    decoder.may_finish.set()
    apply(queue)
    assert decoder.serving == "one"


def test_what_was_read_ahead_is_not_read_again(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    prepare(queue, A, 1)
    queue.add(an_update(A, 1))

    apply(queue)

    assert (decoder.serving, decoder.reads) == ("one", 1)


def test_without_overlap_nothing_is_read_ahead(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder, overlap=False)
    prepare(queue, A, 1)
    assert decoder.reads == 0
    queue.add(an_update(A, 1))

    assert queue.stage_first(may_wait=False)[0] is not None


def test_another_version_than_the_one_read_ahead_is_read(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    prepare(queue, A, 1)
    queue.add(an_update(B, 2))

    apply(queue)

    assert decoder.serving == "two"


def test_a_file_written_again_while_it_was_read_is_read_again(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    decoder.may_finish.clear()
    prepare(queue, A, 1)
    assert decoder.has_begun.wait(2)
    decoder.files[A] = "one again"
    prepare(queue, A, 1)
    decoder.may_finish.set()
    queue.add(an_update(A, 1))

    apply(queue)

    assert decoder.serving == "one again"


def test_an_update_that_waits_for_the_batch_is_not_replaced_by_the_next_version(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    queue.add(an_update(A, 1))
    queue.stage_first()
    prepare(queue, B, 2)

    apply(queue)

    assert decoder.serving == "one"


def test_what_could_not_be_read_ahead_is_tried_again_and_then_refused(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    decoder.fails = 1
    prepare(queue, A, 1)
    queue.add(an_update(A, 1))
    assert apply(queue) == []
    assert decoder.serving == "one"

    decoder.fails = 1
    queue.add(an_update(B, 2))
    assert len(apply(queue)) == 1
    assert decoder.serving == "one"
    assert not queue


def test_a_cancelled_update_is_not_served(decoder: SlowDecoder) -> None:
    queue = a_queue(decoder)
    queue.add(an_update(A, 1))
    queue.stage_first()
    queue.cancel(1)
    queue.add(an_update(B, 2))

    apply(queue)

    assert decoder.serving == "two"


def test_weights_whose_image_is_gone_before_they_are_proved_are_out_of_service(
    decoder: SlowDecoder, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.safetensors"
    decoder.files[gone] = "three"
    queue = a_queue(decoder, overlap=False)
    queue.add(Update(1, gone, 1, OnWeightUpdate.CONTINUE, digest="d1"))
    queue.stage_first()

    with pytest.raises(WeightsDiverged, match=r"version 1 as it was loaded cannot be proved: .*gone\.safetensors"):
        queue.apply_first()
