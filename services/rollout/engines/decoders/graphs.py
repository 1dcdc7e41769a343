"""Runs a computation over fixed tensors, on a GPU as a CUDA graph: hundreds of launches become one.

Source: PyTorch, "CUDA semantics", section "CUDA graphs"; a step of decoding is bound by its launches otherwise.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture, in which libraries choose their kernels and allocate their workspaces."""


class Graphs:
    """Captures a computation once per shape, and replays it.

    Each captured computation reads and writes the same addresses at every replay, so what it is given and what it
    gives are overwritten by the next.

    Args:
        device: of the tensors; on anything but CUDA the computation is simply called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, tuple[Any, Tensor]] = {}
        self._pool: Any = None

    def run(self, shape: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Compute, under a graph that was captured for ``shape`` before or is now."""
        if self._device.type != "cuda":
            return compute()
        if shape not in self._captured:
            self._captured[shape] = self._capture(compute)
            log.debug("captured a CUDA graph", extra={"shape": str(shape), "graphs": len(self._captured)})
        graph, output = self._captured[shape]
        graph.replay()
        return output

    def clear(self) -> None:
        """Forget all that was captured, since tensors it names are gone."""
        if self._captured:
            # One that is still computing is not taken apart.
            torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._pool = None

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may allocate meanwhile, where it reads new weights: that is none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return graph, output
