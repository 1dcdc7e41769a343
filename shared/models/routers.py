"""The routers of a mixture of experts: their choices are recorded, or replayed.

A router gives each token the weights of the experts with the highest scores. In a replay it computes its
scores as ever, with their gradient, and gives the weights of the replayed experts: those of its own softmax,
normalised as the model does it. So the experts that compute are the recorded ones, and routers continue learning.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.routing import RoutingSizes

UNKNOWN: Final = -1
"""In place of an expert's id: nothing was recorded of the token, and its router chooses for itself."""

NORMALISED: Final = frozenset({"MixtralTopKRouter", "Qwen3VLMoeTextTopKRouter"})
"""Routers of transformers that always divide the chosen weights by their sum."""
NORMALISED_IF_SET: Final = frozenset({"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"})
"""Routers of transformers that do where their ``norm_topk_prob`` is set."""


class Routing:
    """Records or replays what the routers of one model choose, while a block asks for it.

    Args:
        model: of transformers, before or after its weights are sharded.

    Raises:
        ModelError: it has no routers, or others than those whose weights are known here.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = NORMALISED | NORMALISED_IF_SET
        routers: list[Any] = [each for each in model.modules() if type(each).__name__ in kinds]
        others = sorted({type(each).__name__ for each in model.modules() if _is_other_router(each)})
        if others or not routers:
            what = f"the routers of {', '.join(others)}" if others else "no routers"
            known = "Qwen2-MoE, Qwen3-MoE, Qwen3-VL-MoE, Mixtral and OLMoE"
            raise ModelError(
                f"algorithm.router_replay does not work with {type(model).__name__}, which has {what}: those of "
                f"{known} can be recorded and replayed. Set it to null"
            )
        found = {(int(each.top_k), int(each.num_experts)) for each in routers}
        if len(found) > 1:
            raise ModelError(f"algorithm.router_replay: the layers of {type(model).__name__} differ in their experts")
        [(top_k, num_experts)] = found
        self.sizes = RoutingSizes(len(routers), top_k, num_experts)
        """Of the model."""
        self._is_recording = False
        self._told: Tensor | None = None
        self._chosen: dict[int, Tensor] = {}
        self._differing: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, router in enumerate(routers):
            is_normalised = type(router).__name__ in NORMALISED or bool(router.norm_topk_prob)
            router.register_forward_hook(self._hook(layer, is_normalised=is_normalised))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what routers choose in the pass that is made while the block runs; ``taken`` returns it."""
        self._is_recording, self._chosen = True, {}
        try:
            yield
        finally:
            self._is_recording = False

    def taken(self, num_rows: int) -> Tensor:
        """Return what the last recorded pass chose, and forget it: [rows, W, layers, top_k] int16, on its device."""
        chosen = [self._chosen[layer] for layer in range(self.sizes.num_layers)]
        self._chosen = {}
        found = torch.stack(chosen, dim=1)
        return found.reshape(num_rows, -1, self.sizes.num_layers, self.sizes.top_k)

    @contextmanager
    def replaying(self, told: Tensor | None) -> Iterator[None]:
        """Replay choices in the forward and backward pass made while the block runs.

        Args:
            told: [rows, W, layers, top_k] int16 ids, ``UNKNOWN`` for tokens that choose for themselves; None: all do.
        """
        self._told = None if told is None else told.flatten(0, 1)
        self._differing = {}
        try:
            yield
        finally:
            self._told = None

    def disagreement(self) -> tuple[Tensor, Tensor] | None:
        """Count tokens and layers whose router would have chosen other experts in the last replayed pass.

        Returns:
            How many, and of how many replayed; None without a replay.
        """
        if not self._differing:
            return None
        counts = [torch.stack(each) for each in self._differing.values()]
        differing, told = torch.stack(counts).sum(0).unbind()
        return differing, told

    def _hook(self, layer: int, *, is_normalised: bool) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            logits, weights, chosen = output
            if self._is_recording:
                # Computed a second time for the backward pass, a layer chooses the same again.
                self._chosen[layer] = chosen.detach().to(torch.int16)
            if self._told is None:
                return None
            told = self._told[:, layer].to(chosen.device, torch.int64)
            is_told = told[:, :1] != UNKNOWN
            picked = torch.where(is_told, told, chosen)
            with torch.no_grad():
                differs = (picked.sort(-1).values != chosen.sort(-1).values).any(-1)
                self._differing[layer] = differs.sum().float(), is_told.sum().float()
            given = logits.softmax(-1, dtype=torch.float).gather(-1, picked)
            given = given / given.sum(-1, keepdim=True) if is_normalised else given
            return logits, given.to(weights.dtype), picked

        return hook


def _is_other_router(module: nn.Module) -> bool:
    """Whether a module looks like a router of transformers, and is none whose weights are known."""
    name = type(module).__name__
    return name.endswith("Router") and name not in NORMALISED | NORMALISED_IF_SET
