"""Images that hold adapters alone: what their header says, and what their tensors are called.

The tensors have the names of peft, so that the image is at the same time the file that peft, SGLang and vLLM read. The
header names the base that they are added to; they are added to no other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "base_model.model."
LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
WEIGHT = ".weight"

BASE = "base"
_SCALE, _TRANSPOSED = "scale", "transposed"


@dataclass(frozen=True, slots=True)
class AdaptersHeader:
    """The metadata of an image of adapters.

    Attributes:
        base: xxh3-64 of the files of the model that they are added to.
        scale: factor of B A.
        is_transposed: whether the weights are [in, out], as GPT-2's are, and not [out, in].
    """

    base: str
    scale: float
    is_transposed: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """What is written into the image's header."""
        return {BASE: self.base, _SCALE: repr(self.scale), _TRANSPOSED: str(int(self.is_transposed))}

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "AdaptersHeader | None":
        """Read it; None where the image holds whole weights.

        Raises:
            ValueError: it is malformed.
        """
        if BASE not in metadata:
            return None
        try:
            scale, is_transposed = float(metadata[_SCALE]), metadata[_TRANSPOSED] == "1"
        except KeyError as error:
            raise ValueError(f"the header of adapters has no {error}") from None
        if not math.isfinite(scale):
            raise ValueError(f"the scale of adapters is {scale}, it has to be finite")
        return cls(metadata[BASE], scale, is_transposed)


def names_of(weight: str) -> tuple[str, str]:
    """Name A and B of a weight, by its name in the model's checkpoint."""
    layer = PREFIX + weight.removesuffix(WEIGHT)
    return layer + LOW, layer + HIGH


def weight_of(name: str) -> str | None:
    """Name the weight that a tensor of adapters belongs to; None if it is no such tensor."""
    for end in (LOW, HIGH):
        if name.startswith(PREFIX) and name.endswith(end):
            return name.removeprefix(PREFIX).removesuffix(end) + WEIGHT
    return None
