"""Weights for SGLang's ``/update_weights_from_tensor``: pieces of an image in memory that its processes can map.

A process of its own holds one piece at a time, in the memory of the server's GPU (CUDA IPC) or, on a CPU, in shared
memory; what goes to the server is a handle of it.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.errors import DeadlineExceeded, WeightTransferFailed, WorkerDied

MODULE = "flotilla.services.rollout.engines.sglang.bucket_process"
BUCKET_BYTES = 1 << 30
"""Of GPU memory that is used beside the server's while it loads; a larger tensor goes alone."""


class Buckets(Protocol):
    """Holds pieces of images for a server."""

    @property
    def bucket_bytes(self) -> int:
        """Most that is held at a time, but for a larger tensor, which goes alone."""

    async def hold(self, image: Path, span: range, *, num_ranks: int) -> list[str]:
        """Hold some tensors of an image instead of what was held before.

        Args:
            image: a safetensors file.
            span: which of its tensors, in the order of their bytes.
            num_ranks: of the server, each of which maps the piece once.

        Returns:
            What each rank is given to find them, as ``serialized_named_tensors`` takes it.

        Raises:
            WeightTransferFailed: the image cannot be read, or there is no room for it.
            WorkerDied: the process ended.
            DeadlineExceeded: it took too long.
        """

    async def release(self) -> None:
        """Hold nothing any more."""

    async def close(self) -> None:
        """Hold nothing, for good."""


class BucketProcess:
    """``Buckets`` in a process of their own, which is started when it is needed.

    Args:
        device: of the server: "cpu", or its first GPU.
        seconds: deadline of holding a piece.
        bucket_bytes: see ``Buckets``.
    """

    def __init__(self, device: str, seconds: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._code = CallProcess(python_module(MODULE), {"device": device}, "the weights for SGLang")
        self._seconds = seconds
        self.bucket_bytes = bucket_bytes

    async def hold(self, image: Path, span: range, *, num_ranks: int) -> list[str]:
        """See ``Buckets.hold``."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._code.start()
                held = await self._code.call([str(image), span.start, span.stop, num_ranks])
        except TimeoutError:
            raise DeadlineExceeded(f"weights were not held for SGLang within {self._seconds} s") from None
        if "error" in held:
            raise WeightTransferFailed(f"the weights cannot be held for SGLang: {held['error']}")
        handles: list[str] = held["handles"]
        return handles

    async def release(self) -> None:
        """See ``Buckets.release``."""
        with suppress(WorkerDied, TimeoutError):
            # A process that has ended holds nothing.
            async with asyncio.timeout(self._seconds):
                await self._code.call(None)

    async def close(self) -> None:
        """See ``Buckets.close``."""
        await self._code.aclose()
