"""What one forward and backward pass of the trainer takes: activations, and logits of a chunk of tokens. Pure.

Counted are the tensors that autograd keeps. With the trainer's own kernels (on a CPU) a norm keeps its input, and the
gate its two inputs; torch's operators keep what is between them, too, and a norm's in float32. Attention is computed in
float32 on a CPU.
"""

from dataclasses import dataclass
from typing import Final

from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.sizes.model import ModelSizes

CHUNK_TOKENS: Final = 1024
"""Tokens whose logits are held at a time, and the bytes of logits that are kept for the backward pass all the same; as
in ``services/trainer/algorithms/log_probs.py``."""
KEPT_LOGITS: Final = 128 << 20
HEAP_BYTES: Final = 32 << 20
"""Glibc does not let its heap grow for blocks from that size on: it maps each apart, and gives it back once freed."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """One pass.

    Attributes:
        positions: P, tokens of its rows.
        slots: G, tokens of its sequences, a prompt counted for each answer to it: what attention reads.
        labels: N, sampled tokens.
        sequences: that it has.
    """

    positions: int
    slots: int
    labels: int
    sequences: int


@dataclass(frozen=True, slots=True)
class How:
    """What computes a pass.

    Attributes:
        size: bytes of an activation: 4 or 2.
        is_native: the trainer's own kernels compute norms, gates and rotations.
        recomputes: ``optimisation.activation_checkpointing``.
        trains_head: the output layer's weight has a gradient.
        attends_apart: attention goes sequence by sequence; else under a mask of the row's length squared.
    """

    size: int
    is_native: bool
    recomputes: bool
    trains_head: bool
    attends_apart: bool = True


def layer_bytes(sizes: ModelSizes, taken: PassSizes, how: How) -> int:
    """Count what one layer keeps for its backward pass."""
    size, hidden, inner = how.size, sizes.hidden, sizes.inner
    # A norm: its input, what is between, and what the next product reads.
    between = 0 if how.is_native else 4
    norm = size + between
    of_position = 2 * hidden * (norm + size)
    if sizes.has_head_norms:
        of_position += (sizes.queries + sizes.keys) * norm
    # The gate's two inputs, what the activation gives, and the product of both.
    gates = 3 if how.is_native else 4
    of_position += (gates if sizes.is_gated else 2) * inner * size
    of_position += sizes.queries * size  # what attention gives
    of_slot = (2 * sizes.queries + 2 * sizes.keys) * (4 if how.is_native else size)
    if not how.is_native and how.size == 2:
        # Keys and values are repeated for the heads that share them.
        of_slot += 2 * (sizes.queries - sizes.keys) * size
    return taken.positions * of_position + taken.slots * of_slot


def kept_bytes(sizes: ModelSizes, taken: PassSizes, how: How) -> int:
    """Count what all layers keep, with the embedded tokens and the last hidden states."""
    layer = layer_bytes(sizes, taken, how)
    ends = taken.positions * sizes.hidden * (3 * how.size) + taken.labels * sizes.hidden * how.size
    if how.recomputes:
        return sizes.layers * taken.positions * sizes.hidden * how.size + layer + ends
    return sizes.layers * layer + ends


def working_bytes(sizes: ModelSizes, taken: PassSizes, how: How) -> int:
    """Count what the backward pass of one layer has beside what is kept: gradients of the gate's inputs and output."""
    return taken.positions * how.size * (3 * sizes.inner + 2 * sizes.hidden)


def hole_bytes(sizes: ModelSizes, taken: PassSizes, how: How, lora: LoraConfig | None = None) -> int:
    """Count what is freed in a CPU's heap and fits nothing that follows.

    glibc before 2.38 does not use the place of an aligned block, as all of torch's are, for another of the same size.
    What a layer keeps, or leaves of gradients, lies between it and the next: of each a hole stays as large as what its
    feed-forward part computes. An adapted layer frees its own output, the adapter's, and that times the scale.
    """
    widest = taken.positions * sizes.inner * how.size
    if widest >= HEAP_BYTES:
        return 0
    if lora is not None:
        return 3 * taken.positions * how.size * sum(shape[0] for shape in sizes.adapted(lora).values())
    return sizes.layers * (3 if sizes.is_gated else 2) * widest


def head_bytes(sizes: ModelSizes, taken: PassSizes, how: How) -> int:
    """Count what the output layer takes at most: logits of a chunk, and the gradient of its weight while it adds up."""
    rows = min(taken.labels, CHUNK_TOKENS)
    is_kept = 4 * taken.labels * sizes.vocabulary <= KEPT_LOGITS
    logits = 4 * sizes.vocabulary * (taken.labels if is_kept else rows)
    if not how.is_native:
        logits += 4 * sizes.vocabulary * rows  # probabilities beside them
    if how.size < 4:
        logits += how.size * sizes.vocabulary * rows  # the product before it is float32
    if not how.trains_head:
        return logits
    several = taken.labels > CHUNK_TOKENS
    return logits + sizes.head * (how.size + (4 if several or how.size < 4 else 0))


def pending_bytes(sizes: ModelSizes, how: How) -> int:
    """Count the head's gradient that waits for the embedding's, where both are one weight."""
    return sizes.head * how.size if how.trains_head and sizes.is_tied else 0
