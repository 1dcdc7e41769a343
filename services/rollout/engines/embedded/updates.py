"""Weight updates that wait to be applied, in the order in which they were asked for.

The image of the first is read into the decoder's spare weights while the old version keeps sampling; only the switch
waits for the batch. Reading happens between two decode steps or, overlapped, on a thread of its own, which may begin as
soon as the image begins to arrive: long before the switch is requested. What is read of an image that then proves
wrong, or is not asked for, is thrown away.

Whether the weights that serve are those that were published is read back from where they are computed with. The
publisher's digest is compared with that of the engine's own memory. Where they differ, each tensor is held against
the image, whose bytes were checked when it came: so the answer names tensors, and a model whose memory the publisher
cannot know (other types, other names) is proved by its image. A product has other last bits on another machine, and
with another number of threads: a weight with an adapter is held against its sum as it was loaded, if the bytes of all
its terms are those of image and base.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flotilla.services.rollout.engines.decoders.adapted import AdaptedTensors, open_whole
from flotilla.services.rollout.engines.decoders.arrival import Arrival, Tensors
from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.services.rollout.engines.embedded.adapters import EngineAdapters
from flotilla.services.rollout.engines.embedded.outcomes import Updated
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, WeightsDiverged, WeightTransferFailed
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Kind, Site
from flotilla.shared.weights.image.digests import combined, of_tensor

log = logging.getLogger(__name__)


@torch.inference_mode()
def prove(decoder: Decoder, image: Path, version: int, expected: str) -> None:
    """Hold what a decoder serves against what was published.

    Args:
        decoder: after ``switch``.
        image: that was loaded.
        version: that it is.
        expected: the publisher's digest of it; see ``digests.of_image``.

    Raises:
        WeightsDiverged: other weights serve, of which the first tensor is named, or it is unknown, since
            the image is gone.
    """
    try:
        wrong, num_tensors = _differing(decoder, image, expected)
    except WeightTransferFailed as error:
        # The former weights are overwritten: an engine that cannot verify the present ones has nothing to serve.
        raise WeightsDiverged(f"version {version} as it was loaded cannot be proved: {error.detail}") from error
    if wrong is None:
        return
    if wrong:
        raise WeightsDiverged(
            f"version {version} as it was loaded is not what was published: {len(wrong)} of {num_tensors} tensors "
            f"differ, the first is {wrong[0]}"
        )
    log.info("weights are proved by their image alone", extra={"version": version})


def _differing(decoder: Decoder, image: Path, expected: str) -> tuple[list[str] | None, int]:
    """Name the tensors that are not those of the image, of how many; None where the digest is the publisher's."""
    with open_whole(image, decoder.base) as source:
        found: dict[str, int] = {}
        for name, digest in decoder.digests():
            if name in source.headers:
                # Of two copies of one weight both have to be right.
                found[name] = digest if found.get(name, digest) == digest else found[name] ^ digest
        if combined(found) == expected:
            return None, len(found)
        wrong = [name for name, digest in found.items() if not _is_right(name, digest, source)]
        return wrong, len(found)


def _is_right(name: str, digest: int, source: Tensors) -> bool:
    if isinstance(source, AdaptedTensors) and digest == source.digest_of_loaded(name):
        return True
    return digest in _as_loaded(source.read(name))


def _as_loaded(tensor: torch.Tensor) -> frozenset[int]:
    """Digest a tensor of an image in each type that a model may hold it in."""
    types = {tensor.dtype, torch.float32, torch.bfloat16} if tensor.dtype.is_floating_point else {tensor.dtype}
    return frozenset(of_tensor(tensor.to(dtype)) for dtype in types)


@dataclass(frozen=True, slots=True)
class Update:
    """New weights, and what happens to the samples in flight."""

    update_id: int
    image: Path
    version: int
    mode: OnWeightUpdate
    digest: str | None = None
    """The publisher's; None: unknown."""

    @property
    def content(self) -> tuple[Path, int]:
        """What is read for it."""
        return self.image, self.version


@dataclass(frozen=True, slots=True)
class Reading:
    """An image that is being read into the spare weights, or was.

    Attributes:
        content: image and version; None when the file may since have been written again.
        result: done when it is read.
        is_ahead: whether it was not requested yet.
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
            self.arrival.abort("another image takes its place")


class UpdateQueue:
    """Updates in order; the first one is staged.

    Args:
        decoder: whose weights they replace.
        overlap: whether images are read on a thread of their own.

    Attributes:
        adapters: of single samples, which belong to the weights that serve: others forget them.
    """

    def __init__(self, decoder: Decoder, *, overlap: bool = False) -> None:
        self._decoder = decoder
        self.adapters = EngineAdapters(decoder)
        self._updates: list[Update] = []
        self._staged: tuple[Path, int] | None = None
        self._reading: Reading | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging") if overlap else None

    def __bool__(self) -> bool:
        return bool(self._updates or self.adapters.waiting)

    def add(self, update: Update) -> None:
        """Add an update behind the others."""
        self._updates.append(update)

    def cancel(self, update_id: int) -> None:
        """Forget an update that has not been applied."""
        self._updates = [update for update in self._updates if update.update_id != update_id]
        waiting = self.adapters.waiting
        self.adapters.waiting = [update for update in waiting if update.update_id != update_id]

    def clear(self) -> None:
        """Forget all updates, and what is read ahead of bytes that have not arrived."""
        self._updates.clear()
        self.adapters.waiting.clear()
        if self._reading is not None:
            self._reading.give_up()

    def forget(self, why: FlotillaError) -> list[Updated]:
        """Forget all updates, and everything that was read; returns the report of each update."""
        ended = [Updated(update.update_id, why) for update in self._updates]
        self._updates.clear()
        self.forget_read()
        return ended + self.adapters.forget(why)

    def forget_read(self) -> None:
        """Forget everything that was read."""
        if self._reading is not None:
            self._reading.give_up()
            # It writes into the spare weights: they can be freed, or written, once it has ended.
            wait([self._reading.result])
        self._reading = self._staged = None

    def begin(self, arrival: Arrival) -> None:
        """Begin to read an image while it is received, unless another one is in the way or nothing overlaps."""
        if self._thread is None or self._updates or arrival.is_right:
            return  # One that is right already is about to be completed.
        if self._reading is not None:
            self._reading.give_up()
            if self._reading.is_under_way and self._reading.arrival is None:
                return
        self._staged = None
        self._read(arrival.content, is_ahead=True, arrival=arrival)

    def complete(self, arrival: Arrival) -> None:
        """Begin to read an image that is whole and right, unless it was read as it arrived, or another is in the way.

        Args:
            arrival: of the image, completed already.
        """
        if self._thread is None:
            return
        reading = self._reading
        if reading is not None:
            if reading.arrival is arrival and reading.content is not None:
                return
            reading.give_up()
        if self._updates or (reading is not None and reading.is_under_way):
            if reading is not None:
                # It may be the same file, written again while it was read.
                self._reading = replace(reading, content=None)
            return
        self._staged = None
        self._read(arrival.content, is_ahead=True)

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
        """Switch to the staged weights, and prove that they are in place.

        Raises:
            WeightsDiverged: they are not, or it is unknown.
        """
        assert self._updates and self._staged == self._updates[0].content
        faults = armed()
        if faults is None or Kind.KEEP not in faults.damage(Site.ENGINE_SWITCH):
            self._decoder.switch()
            self.adapters.clear()
        update = self._updates.pop(0)
        self._staged = None
        if update.digest is not None:
            prove(self._decoder, update.image, update.version, update.digest)

    @property
    def first(self) -> Update | None:
        """The update that comes next."""
        return self._updates[0] if self._updates else None

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
