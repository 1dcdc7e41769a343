"""Whether the weights that serve are those that were published: read back from where they are computed with.

The publisher's digest is compared with that of the engine's own memory. Where they differ, each tensor is held against
the image, whose bytes were checked when it came: so the answer names tensors, and a model whose memory the publisher
cannot know (other types, other names) is proved by its image. A product has other last bits on another machine, and
with another number of threads: a weight with an adapter is held against its sum as it was loaded, if the bytes of all
its terms are those of image and base.
"""

import logging
from pathlib import Path

import torch

from flotilla.services.rollout.engines.decoders.adapted import AdaptedTensors, open_whole
from flotilla.services.rollout.engines.decoders.arrival import Tensors
from flotilla.services.rollout.engines.decoders.base import Decoder
from flotilla.shared.errors import WeightsDiverged, WeightTransferFailed
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
        WeightsDiverged: what serves is something else, of which the first tensor is named, or nobody can tell, since
            the image is gone.
    """
    try:
        wrong, num_tensors = _differing(decoder, image, expected)
    except WeightTransferFailed as error:
        # The weights of before are overwritten: whoever cannot tell what serves now has nothing to serve.
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
