"""Whether the weights that serve are those that were published: read back from where they are computed with.

The publisher's digest is compared with that of the engine's own memory. Where they differ, each tensor is held against
the image, whose bytes were checked when it came: so the answer names tensors, and a model whose memory the publisher
cannot know (other types, other names) is proved by its image.
"""

import logging
from pathlib import Path

import torch

from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.services.rollout.engines.decoders.checkpoint import open_tensors
from flotilla.shared.errors import WeightsDiverged
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
        WeightsDiverged: what serves is something else; names the first tensor.
        WeightTransferFailed: the image is gone.
    """
    with open_tensors([image]) as source:
        found: dict[str, int] = {}
        for name, digest in decoder.digests():
            if name in source.headers:
                # Of two copies of one weight both have to be right.
                found[name] = digest if found.get(name, digest) == digest else found[name] ^ digest
        if combined(found) == expected:
            return
        wrong = [name for name, digest in found.items() if digest not in _as_loaded(source.read(name))]
    if wrong:
        raise WeightsDiverged(
            f"version {version} as it was loaded is not what was published: {len(wrong)} of {len(found)} tensors "
            f"differ, the first is {wrong[0]}"
        )
    log.info("weights are proved by their image alone", extra={"version": version})


def _as_loaded(tensor: torch.Tensor) -> frozenset[int]:
    """Digest a tensor of an image in each type that a model may hold it in."""
    types = {tensor.dtype, torch.float32, torch.bfloat16} if tensor.dtype.is_floating_point else {tensor.dtype}
    return frozenset(of_tensor(tensor.to(dtype)) for dtype in types)
