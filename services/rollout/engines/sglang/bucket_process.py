"""Run as a process of its own: holds a piece of a weight image where SGLang's processes can map it.

SGLang wants a pickle of handles (``MultiprocessingSerializer``), so one is made here, of plain values and one tensor
that lies in memory which others can map: it has a handle of the memory, no bytes of it. Nothing is ever unpickled here.
"""

import base64
import io
import mmap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from flotilla.shared.children.serving import serve
from flotilla.shared.errors import FlotillaError
from flotilla.shared.weights.image.image import layout_of
from flotilla.shared.weights.image.tensors import TORCH_DTYPES


class HeldPiece:
    """One piece at a time; see ``flotilla.services.rollout.engines.sglang.buckets.Buckets``.

    Args:
        opening: ``{"device": NAME}``.
    """

    about = True

    def __init__(self, opening: Any) -> None:
        self._device = torch.device(opening["device"])
        self._held: Tensor | None = None
        # The other strategy needs a secret of the process that maps it.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    def handle(self, content: Any) -> object:
        """Hold ``[image, first tensor, one past the last, ranks]``, or with None nothing."""
        self._held = None
        if self._device.type == "cuda":
            # What the server has given back is free again.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        if content is None:
            return {}
        try:
            image, first, end, num_ranks = content
            return {"handles": self._hold(Path(image), range(first, end), num_ranks)}
        except (FlotillaError, OSError, RuntimeError, ValueError) as error:
            return {"error": str(error)}

    def _hold(self, image: Path, span: range, num_ranks: int) -> list[str]:
        with image.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = layout_of(mapped).tensors[span.start : span.stop]
        start, end = tensors[0].start, tensors[-1].end
        source = torch.frombuffer(mapped, dtype=torch.uint8, count=end - start, offset=start)
        if self._device.type == "cuda":
            self._held = source.to(self._device)
            torch.cuda.synchronize(self._device)
        else:
            self._held = source.clone().share_memory_()  # type: ignore[no-untyped-call]
        places = [
            SimpleNamespace(
                name=each.name,
                shape=tuple(each.shape),
                dtype=TORCH_DTYPES[each.dtype],
                start_idx=each.start - start,
                end_idx=each.end - start,
                numel=each.end - each.start,
            )
            for each in tensors
        ]
        # Each rank gives back its own handle: one for all would be given back too often.
        return [handle_of({"flattened_tensor": self._held, "metadata": places}) for _ in range(num_ranks)]


def handle_of(bucket: dict[str, Any]) -> str:
    """Write a bucket as SGLang reads it."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


if __name__ == "__main__":
    serve(HeldPiece)
