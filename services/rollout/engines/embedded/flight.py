"""What a step has sampled, on its way from the device to the host."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Flight:
    """Sampled tokens that the next step may compute with before the host knows them.

    Args:
        token_ids: [B] int64, on the device.
        log_probs: [B] float32, there too.

    Attributes:
        token_ids: as given.
    """

    def __init__(self, token_ids: Tensor, log_probs: Tensor) -> None:
        self.token_ids = token_ids
        self._done: Any = None
        if token_ids.device.type != "cuda":
            self._on_host = token_ids, log_probs
            return
        # Copied behind the computation, which the host does not wait for before it has launched the next one.
        self._on_host = _pinned(token_ids), _pinned(log_probs)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def land(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Wait until they are here: token ids and log-probabilities, [B] each."""
        if self._done is not None:
            self._done.synchronize()
        token_ids, log_probs = self._on_host
        return token_ids.numpy(), log_probs.numpy()


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
