"""A publication: the transfer of one policy version's weights to the rollouts.

What travels is a *weight image*: one contiguous byte range that is itself a complete safetensors file (8-byte header
length, JSON header, tensor data). Sender and receiver keep it in a shared-memory file, so one checksum covers names,
shapes, dtypes and data, and a received image can be served, mapped or saved as it is.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import FailFast, Field

from flotilla.shared.schemas.wire import TolerantWire


class Transport(StrEnum):
    """How one rollout gets a published image; what none of them reaches pulls it."""

    GLOO = "gloo"
    NCCL = "nccl"
    SHARED_MEMORY = "shared_memory"
    ENGINE = "engine"
    """The ranks of its engine are members of the group themselves: no process of the rollout sees a byte."""


class TensorSpec(TolerantWire):
    """One tensor of a weight image, under its Hugging Face checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Safetensors name of the element type, such as F32 or BF16."""
    start: int = Field(ge=0)
    """Offset of its first byte in the image."""
    end: int = Field(ge=0)
    """Offset one past its last byte."""


class DeltaManifest(TolerantWire):
    """A patch that makes the image of one that the members hold; see ``flotilla.shared.weights.image.delta``."""

    base_checksum: str
    """xxh3-64 of the image that it is applied to."""
    block_bytes: int = Field(gt=0)
    patch_bytes: int = Field(gt=0)
    checksum: str
    """xxh3-64 of the patch."""


class Manifest(TolerantWire):
    """What a publication will send."""

    version: int = Field(ge=0)
    image_bytes: int = Field(gt=0)
    slice_bytes: int = Field(gt=0)
    """The image is broadcast in slices of this many bytes, the last one shorter."""
    checksum: str
    """xxh3-64 of the whole image, 16 hexadecimal digits."""
    digest: str | None = None
    """Of its tensors' values in the type that rollouts compute in, whatever their layout, 32 hexadecimal digits: what
    an engine finds in its own memory once it serves them. See ``flotilla.shared.weights.image.digests``."""
    tensors: Annotated[tuple[TensorSpec, ...], FailFast()]
    """In the order of the image; of wrong ones the first is named, for there may be tens of thousands."""
    image_path: str | None = None
    """Where processes that share memory with the trainer find the image; None if it offers none."""
    delta: DeltaManifest | None = None
    """The patch that is broadcast instead of the image; None broadcasts the image."""
    base: str | None = None
    """xxh3-64 of the files of the model that the image's adapters are added to; None: it has whole weights."""


class PublicationPhase(StrEnum):
    """Where a publication stands. ``committed`` and ``aborted`` are final."""

    PREPARING = "preparing"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Rendezvous(TolerantWire):
    """Where the members of an epoch meet: a TCPStore that the sender opened for this epoch alone."""

    host: str
    port: int = Field(gt=0, lt=65536)
    epoch: int = Field(ge=1)
    world_size: int = Field(ge=1)


RELAY = "relay"
"""What services say, beside transports, that can get a version from a member that has received it."""


def is_relayed_to(rank: int | None, transport: Transport) -> bool:
    """Whether a member fetches the image from another one: it has no place in the group, and nothing of the trainer's
    to map."""
    return rank is None and transport is not Transport.SHARED_MEMORY


class Member(TolerantWire):
    """One receiver of a publication."""

    service_id: str
    rank: int | None = Field(ge=1)
    """Its rank in the collective, in which the trainer is 0; None if it maps or fetches the image instead."""
    num_ranks: int = Field(1, ge=1)
    """Ranks that are its own, from ``rank`` on."""
    transport: Transport = Transport.GLOO
    shared_memory: str | None = None
    """Identity of the shared memory in which it may map another member's image; None if it may not."""

    @property
    def is_relayed_to(self) -> bool:
        """See ``is_relayed_to``."""
        return is_relayed_to(self.rank, self.transport)


class PublicationRequest(TolerantWire):
    """What a trainer sends to announce a version."""

    manifest: Manifest
    step: int = Field(ge=0)
    """Optimiser steps that the version contains."""


class Publication(TolerantWire):
    """A publication as the gateway sees it."""

    experiment_id: str
    version: int
    epoch: int
    phase: PublicationPhase
    members: tuple[Member, ...]
    rendezvous: Rendezvous | None = None
    """None until the sender has opened the epoch's store."""
    deadline_seconds: float
    """Time that each phase may take."""
    is_delta: bool = False
    """Whether the sender broadcasts the manifest's patch: every member holds its base."""
    reason: str | None = None
    """Why it was aborted, or why the last epoch was closed."""


class PublicationOrder(TolerantWire):
    """A member's task in a publication, as part of its desired state."""

    version: int
    epoch: int
    transport: Transport = Transport.GLOO
    rank: int | None
    num_ranks: int = Field(1, ge=1)
    phase: PublicationPhase
    rendezvous: Rendezvous | None
    manifest: Manifest
    deadline_seconds: float
    sources: tuple[str, ...] = ()
    """Where one that is relayed to fetches the image: a member that has it, then the sender in case that one fails.
    Empty until a member can pass it on."""
    may_map: bool = False
    """Whether the first of them is in the same shared memory."""

    @property
    def is_relayed_to(self) -> bool:
        """See ``is_relayed_to``."""
        return is_relayed_to(self.rank, self.transport)


class ReceiveState(StrEnum):
    """A member's progress in a publication."""

    JOINED = "joined"
    RECEIVED = "received"
    FAILED = "failed"


class PublicationReport(TolerantWire):
    """A member's report on a publication, as part of its observed state."""

    version: int
    epoch: int
    state: ReceiveState
    checksum: str | None = None
    detail: str | None = None
