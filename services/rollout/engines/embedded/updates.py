"""Weight updates that wait to be applied, in the order in which they were asked for.

The image of the first is read into the decoder's spare weights while the old version goes on sampling; only the switch
waits for the batch. Reading happens between two decode steps or, overlapped, on a thread of its own, which may begin as
soon as the image begins to arrive: long before anybody asks for the switch. What is read of an image that then proves
wrong, or is not asked for, is thrown away.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from services.rollout.engines.decoders.arrival import Arrival
from services.rollout.engines.decoders.base import Decoder
from services.rollout.engines.embedded.outcomes import Updated
from shared.config.asynchrony import OnWeightUpdate
from shared.errors import WeightTransferFailed


@dataclass(frozen=True, slots=True)
class Update:
    """New weights, and what happens to the samples in flight."""

    update_id: int
    image: Path
    version: int
    mode: OnWeightUpdate

    @property
    def content(self) -> tuple[Path, int]:
        """What is read for it."""
        return self.image, self.version


@dataclass(frozen=True, slots=True)
class Reading:
    """An image that is being read into the spare weights, or was.

    Attributes:
        content: image and version; None when the file may since have been written anew.
        result: done when it is read.
        is_ahead: whether nobody had asked for it yet.
        arrival: of an image that was being received when reading began.
    """

    content: tuple[Path, int] | None
    result: Future[None]
    is_ahead: bool
    arrival: Arrival | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the spare weights are being written."""
        return not self.result.done()

    def give_up(self) -> None:
        """Wait no longer for bytes that have not arrived; what was read is of no use then."""
        if self.arrival is not None:
            self.arrival.give_up()


class UpdateQueue:
    """Updates in order; the first one is staged.

    Args:
        decoder: whose weights they replace.
        overlap: whether images are read on a thread of their own.
    """

    def __init__(self, decoder: Decoder, *, overlap: bool = False) -> None:
        self._decoder = decoder
        self._updates: list[Update] = []
        self._staged: tuple[Path, int] | None = None
        self._reading: Reading | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging") if overlap else None

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, update: Update) -> None:
        """Add an update behind the others."""
        self._updates.append(update)

    def cancel(self, update_id: int) -> None:
        """Forget an update that has not been applied."""
        self._updates = [update for update in self._updates if update.update_id != update_id]

    def clear(self) -> None:
        """Forget all updates, and what is read ahead of bytes that have not arrived."""
        self._updates.clear()
        if self._reading is not None:
            self._reading.give_up()

    def expect(self, image: Path, version: int, transfer: int) -> None:
        """Begin to read an image while it is received, unless another one is in the way or nothing overlaps."""
        if self._thread is None or self._updates:
            return
        if self._reading is not None:
            self._reading.give_up()
            if self._reading.is_under_way and self._reading.arrival is None:
                return
        self._staged = None
        self._read((image, version), is_ahead=True, arrival=Arrival(transfer))

    def note_arrived(self, transfer: int, num_bytes: int) -> None:
        """Learn that the first bytes of a transfer are there; any thread may say so."""
        if (arrival := self._arrival_of(transfer)) is not None:
            arrival.advance(num_bytes)

    def note_right(self, transfer: int) -> None:
        """Learn that the image of a transfer is whole, and its checksum right; any thread may say so."""
        if (arrival := self._arrival_of(transfer)) is not None:
            arrival.complete()

    def forget(self, transfer: int) -> None:
        """Learn that a transfer failed; any thread may say so."""
        if (arrival := self._arrival_of(transfer)) is not None:
            arrival.give_up()

    def prepare(self, image: Path, version: int, transfer: int | None = None) -> None:
        """Begin to read an image that will be asked for, unless another one is in the way or nothing overlaps.

        Args:
            image: complete and right.
            version: that it will be.
            transfer: what it came by, if it was expected: then it has been read already.
        """
        if self._thread is None:
            return
        if transfer is not None and self._arrival_of(transfer) is not None:
            self.note_right(transfer)
            return
        if self._reading is not None:
            self._reading.give_up()
        if self._updates or (self._reading is not None and self._reading.is_under_way):
            if self._reading is not None:
                # It may be the same file, written anew while it was read.
                self._reading = replace(self._reading, content=None)
            return
        self._staged = None
        self._read((image, version), is_ahead=True)

    def stage_first(self, *, may_wait: bool = True) -> tuple[Update | None, list[Updated]]:
        """Stage the first update whose image fits.

        Args:
            may_wait: whether there is nothing else to do than to wait for the thread that reads.

        Returns:
            The update that is staged now, or None, and a report of each one that was refused.
        """
        refused: list[Updated] = []
        while self._updates and self._staged != self._updates[0].content:
            self._staged = None
            if self._reading is None:
                self._read(self._updates[0].content, is_ahead=False)
            assert self._reading is not None
            reading = self._reading
            if reading.content != self._updates[0].content or not (reading.arrival is None or reading.arrival.is_right):
                reading.give_up()
            if not (reading.result.done() or may_wait):
                return None, refused
            error, self._reading = reading.result.exception(), None
            if reading.content != self._updates[0].content or (error is not None and reading.is_ahead):
                continue  # What was read is of no use: it is read again.
            if isinstance(error, WeightTransferFailed):
                refused.append(Updated(self._updates.pop(0).update_id, error))
            elif error is not None:
                raise error
            else:
                self._staged = reading.content
        return (self._updates[0] if self._updates else None), refused

    def apply_first(self) -> None:
        """Switch to the staged weights."""
        assert self._updates and self._staged == self._updates[0].content
        self._decoder.switch()
        self._updates.pop(0)
        self._staged = None

    @property
    def first(self) -> Update | None:
        """The update that comes next."""
        return self._updates[0] if self._updates else None

    def _arrival_of(self, transfer: int) -> Arrival | None:
        reading = self._reading  # Once: another thread may be asking.
        arrival = reading.arrival if reading is not None and reading.content is not None else None
        return arrival if arrival is not None and arrival.transfer == transfer else None

    def _stage(self, image: Path, arrival: Arrival | None) -> None:
        self._decoder.stage(image, arrival)
        if arrival is not None:
            arrival.wait_until_right()

    def _read(self, content: tuple[Path, int], *, is_ahead: bool, arrival: Arrival | None = None) -> None:
        if self._thread is not None:
            result = self._thread.submit(self._stage, content[0], arrival)
        else:
            result = Future()
            try:
                self._decoder.stage(content[0])
            except WeightTransferFailed as error:
                result.set_exception(error)
            else:
                result.set_result(None)
        self._reading = Reading(content, result, is_ahead, arrival)
