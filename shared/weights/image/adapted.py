"""Weights that adapters are added to: their sum, and the digest of what an engine serves that adds them itself."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of, weight_of
from flotilla.shared.weights.image.digests import combined, in_dtype, of_tensor


def added_to(weight: Tensor, low: Tensor, high: Tensor, header: AdaptersHeader) -> Tensor:
    """Add the product of adapters to a weight, as the trainer does where it merges them.

    Args:
        weight: [out, in], or [in, out] where it is transposed.
        low: A, [r, in] float32.
        high: B, [out, r] float32.
        header: has the scale.

    Returns:
        The sum, computed in float32, in the weight's dtype.
    """
    added = header.scale * (high @ low)
    return (weight.float() + (added.T if header.is_transposed else added)).to(weight.dtype)


class AdaptedDigests:
    """Makes the digests of versions of adapters that are published alone, as engines find them in their memory.

    Weights without an adapter are digested once.

    Args:
        files: of the base.
        dtype: that engines compute in; None: that of the base.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype | None) -> None:
        self._files, self._dtype = files, dtype
        self._plain: dict[str, int] = {}

    @torch.no_grad()
    def of(self, adapters: Mapping[str, Tensor], header: AdaptersHeader) -> str:
        """Digest the base with adapters added; one weight at a time is in memory.

        Args:
            adapters: A and B under peft's names.
            header: of their image.

        Raises:
            WeightTransferFailed: the files of the base cannot be read.
        """
        adapted = {weight_of(name) for name in adapters}
        found: dict[str, int] = {}
        try:
            with ExitStack() as stack:
                for path in self._files:
                    file = stack.enter_context(safe_open(path, framework="pt"))
                    for name in file.keys():  # noqa: SIM118  no mapping
                        if name in adapted:
                            weight = in_dtype(file.get_tensor(name), self._dtype)
                            low, high = (adapters[each].float() for each in names_of(name))
                            found[name] = of_tensor(added_to(weight, low, high, header))
                        else:
                            if name not in self._plain:
                                self._plain[name] = of_tensor(in_dtype(file.get_tensor(name), self._dtype))
                            found[name] = self._plain[name]
        except (OSError, SafetensorError) as error:
            raise WeightTransferFailed(f"the files of the base cannot be read: {error}") from error
        return combined(found)
