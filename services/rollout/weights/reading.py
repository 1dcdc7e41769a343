"""Lets an engine read a version that is missed while it comes, before anybody knows that it is right."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

from flotilla.services.rollout.engines.base import Engine, WeightTransfer
from flotilla.shared.errors import WorkerDied


class Reading:
    """Begins a ``WeightTransfer`` with the first bytes; the version is right if the block ends without an error.

    Args:
        engine: reads it.
        version: that it will be.
    """

    def __init__(self, engine: Engine, version: int) -> None:
        self._engine, self._version = engine, version
        self._transfer: tuple[Path, WeightTransfer] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abort(str(error) or kind.__name__)
        elif self._transfer is not None:
            self._transfer[1].complete()

    def advance(self, image: Path, num_bytes: int) -> None:
        """Note how far a file is; the pull has begun anew if it is another one than before."""
        if self._transfer is not None and self._transfer[0] != image:
            self._abort("it is pulled anew")
        if self._transfer is None:
            with contextlib.suppress(WorkerDied):  # whoever loads it finds out
                self._transfer = image, self._engine.begin_transfer(image, self._version)
        if self._transfer is not None:
            self._transfer[1].advance(num_bytes)

    def _abort(self, reason: str) -> None:
        if self._transfer is not None:
            self._transfer[1].abort(reason)
            self._transfer = None
