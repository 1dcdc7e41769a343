"""The adapters that an engine's samples may have: by name, each under a version."""

from collections.abc import Iterable
from pathlib import Path

from flotilla.services.rollout.engines.base import GenerationRequest
from flotilla.services.rollout.engines.decoders.base import AdaptingDecoder, Decoder
from flotilla.services.rollout.engines.embedded.batch import Rows
from flotilla.shared.errors import InvalidRequest


class EngineAdapters:
    """Tells which adapters there are, and gives rows those that their requests name.

    Args:
        decoder: that computes with them, if it can.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._rows = decoder.row_adapters if isinstance(decoder, AdaptingDecoder) else None
        self._versions: dict[str, int] = {}

    @property
    def are_taken(self) -> bool:
        """Whether the decoder can compute with them."""
        return self._rows is not None

    def load(self, name: str, file: Path, scale: float, version: int) -> None:
        """Read one, which takes the place of the one of its name.

        Raises:
            InvalidRequest: the decoder takes none.
            WeightTransferFailed: it cannot be read, or does not fit the model; what was there stays.
        """
        if self._rows is None:
            raise InvalidRequest("this engine adds no adapters to single samples: load weights that have them merged")
        self._rows.put(name, file, scale)
        self._versions[name] = version

    def drop(self, name: str, in_flight: Iterable[GenerationRequest]) -> None:
        """Forget one.

        Raises:
            InvalidRequest: a request in flight has it.
        """
        if any(request.adapter == name for request in in_flight):
            raise InvalidRequest(f"the adapter {name} is sampled with: end those requests first")
        if self._versions.pop(name, None) is not None and self._rows is not None:
            self._rows.drop(name)

    def clear(self) -> None:
        """Forget all of them; no sample has one."""
        self._versions.clear()
        if self._rows is not None:
            self._rows.clear()

    def check(self, request: GenerationRequest) -> None:
        """Check that a request's adapter is there.

        Raises:
            InvalidRequest: it is not.
        """
        if request.adapter is not None and request.adapter not in self._versions:
            raise InvalidRequest(f"there is no adapter {request.adapter}: load it first")

    def version_of(self, request: GenerationRequest, otherwise: int) -> int:
        """Return the version of a request's adapter; that of the weights where it has none."""
        return otherwise if request.adapter is None else self._versions[request.adapter]

    def assign(self, rows: Rows, request: GenerationRequest) -> None:
        """Let rows that a request joins with compute with its adapter, or with none."""
        if self._rows is not None:
            self._rows.assign(rows.tolist(), request.adapter)
