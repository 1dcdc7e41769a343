"""How a policy version's weights reach the rollouts."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from flotilla.shared.config.base.addresses import is_loopback
from flotilla.shared.config.base.model import Config


class TransportChoice(StrEnum):
    """What carries the weights from the trainer to a rollout."""

    AUTO = "auto"
    GROUP = "group"
    GLOO = "gloo"
    NCCL = "nccl"
    SHARED_MEMORY = "shared_memory"
    PULL = "pull"


DEFAULT_SLICE_MEGABYTES = 8
"""Slices of 4 to 16 MB are the fastest through gloo; larger ones gain nothing."""

ENGINE_BUCKET_MEGABYTES = 256
"""For each broadcast to engines there is a request to each of them; each takes so much memory beside its weights."""

MAX_SLICE_MEGABYTES = 64

COLLECTIVE = frozenset({TransportChoice.AUTO, TransportChoice.GROUP, TransportChoice.GLOO, TransportChoice.NCCL})
"""Transports that broadcast, or may."""


class DeltaConfig(Config):
    """Broadcast only the blocks that differ from the last committed version.

    Pays where much of the model does not change from version to version (frozen layers, experts without tokens); an
    optimizer that moves every weight leaves no block as it was.
    """

    block_kilobytes: int = Field(256, ge=4, le=4096)
    """Size of a compared block in KiB."""
    max_share: float = Field(0.5, gt=0, lt=1)
    """The whole image is sent when the changed blocks are more than this share of its bytes."""


class PublicationConfig(Config):
    """Transport and format of the weights. Whatever is chosen, a version is served only when it is whole, its checksum
    is right and the gateway has committed it; a rollout that the transport does not reach pulls it over HTTP."""

    transport: TransportChoice = TransportChoice.AUTO
    """auto: rollouts on the trainer's host map its image in shared memory, also when they join; the others form a
    group, of nccl where trainer and engines are on GPUs, else of gloo. group: every rollout is a member of that group,
    also on the trainer's host. gloo, nccl: the same, of that backend. shared_memory: only that. pull: every rollout
    fetches each version over HTTP after it is committed. A rollout that cannot use what is chosen pulls."""
    wire_dtype: Literal["bfloat16"] | None = None
    """Round floating-point weights to this dtype for the transfer; the engine loads them into model.dtype. Halves the
    bytes; the trainer's log-probs then differ from the engine's by the rounding. Null: weights travel as they are."""
    quantisation: Literal["int8", "fp8"] | None = None
    """Publish every matrix with 8 bits an element, which the embedded engine multiplies by scales when it loads them:
    about half the bytes of bfloat16. int8: a scale for each row; fp8: numbers of E4M3, a scale for each block of 128 x
    128. The engine then samples from another policy than is trained: algorithm.old_log_probs left out is recompute, so
    that the correction for the sampler is on. Null: weights travel whole. See docs/weights.md."""
    slice_megabytes: int | None = Field(None, ge=1, le=MAX_SLICE_MEGABYTES)
    """Size of one broadcast in MiB; several are under way at once. Null: 8, and 256 to engines that are members of the
    group themselves (rollout.engine.update_weights_from: distributed)."""

    overlap_load: bool | None = None
    """True: the engine reads a version into its spare weights on a thread of its own while it samples: a broadcast
    image as its slices arrive, any other once it is checked. At the commit it only switches. False: it reads after the
    commit, between two tokens, and sampling pauses for as long. Null: true where the engine has spare weights, which
    the embedded one has."""
    write_to_directory: bool = False
    """Also write the image of each version to `weights` in the experiment's directory, the newest two. A rollout that
    joins reads ranges of it there too, where it sees the gateway's data directory under the same path as the trainer
    (a shared file system); also while there is no trainer. Costs a write of the whole image per version."""
    lora: Literal["auto", "adapters", "merged"] = "auto"
    """What a version holds where model.lora trains adapters. adapters: A and B alone, which rollouts add to the weights
    of model.path; with vllm the server adds them itself. merged: all weights, with the adapters added to them. auto:
    adapters where the engine is the embedded one, that of every rollout that the experiment starts with can take them,
    and no other key needs whole weights, else merged; what was decided then stays."""
    delta: DeltaConfig | None = None
    """Broadcast changed blocks only; null sends whole images. A rollout that holds another version than the last
    committed one makes that publication a whole one; members that map or pull the image are not affected."""

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> "PublicationConfig":
        if self.slice_megabytes is not None and self.transport not in COLLECTIVE:
            raise ValueError(
                f"asynchrony.publication.slice_megabytes {self.slice_megabytes} has no effect with "
                f"asynchrony.publication.transport {self.transport}, which does not broadcast: leave it out, or set "
                "transport to auto, group, gloo or nccl"
            )
        if self.delta is not None and self.transport not in COLLECTIVE:
            raise ValueError(
                f"asynchrony.publication.delta has no effect with asynchrony.publication.transport {self.transport}, "
                "which does not broadcast (shared_memory copies nothing anyway): leave it out, or set transport to "
                "auto, group, gloo or nccl"
            )
        return self

    @property
    def may_broadcast(self) -> bool:
        """Whether services need their end of a weight group."""
        return self.transport in COLLECTIVE

    def expects_broadcasts(self, host: str) -> bool:
        """Whether a service at an address will probably take part in one: its end is a process that imports torch.

        Services on the loopback address are on one machine and map images where they may. One that has to broadcast all
        the same starts its end with the first weight group that it is in.
        """
        return self.may_broadcast and not (self.may_map and is_loopback(host))

    @property
    def may_map(self) -> bool:
        """Whether a rollout may map an image that is in its shared memory."""
        return self.transport in {TransportChoice.AUTO, TransportChoice.SHARED_MEMORY}

    @property
    def slice_bytes(self) -> int:
        """Size of one broadcast."""
        return (self.slice_megabytes or DEFAULT_SLICE_MEGABYTES) << 20
