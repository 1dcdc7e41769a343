"""Servers' reports of the experts that a model's routers chose, as records; pure functions.

A server counts every layer, those without a router as well, and writes nothing that means anything there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from flotilla.services.rollout.engines.base import GenerationRequest, Prefix
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.routing import RoutedExperts, RoutingSizes, joined

MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
"""Model types whose records the trainer can replay."""


@dataclass(frozen=True, slots=True)
class ServedRouters:
    """The routers of a served model.

    Attributes:
        sizes: what they choose among.
        num_layers: of the model, with a router or without.
        layers: numbers of those that have one.
    """

    sizes: RoutingSizes
    num_layers: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ServedRouters":
        """Read them from a model's ``config.json``.

        Raises:
            ModelError: it has none, or none that can be replayed.
        """
        kind = config.get("model_type")
        if kind not in MIXTURES:
            raise ModelError(
                f"algorithm.router_replay R3 does not work with model_type {kind}: use one of {', '.join(MIXTURES)}"
            )
        try:
            count, every = int(config["num_hidden_layers"]), int(config.get("decoder_sparse_step") or 1)
            plain = {int(layer) for layer in config.get("mlp_only_layers") or ()}
            top_k = int(config["num_experts_per_tok"])
            num_experts = int(config.get("num_experts") or config["num_local_experts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"config.json does not define the number of experts per layer: {error!r}") from error
        layers = tuple(layer for layer in range(count) if layer not in plain and (layer + 1) % every == 0)
        if not layers:
            raise ModelError("algorithm.router_replay R3: no layer of the model has experts")
        return cls(RoutingSizes(len(layers), top_k, num_experts), count, layers)

    def record(self, found: npt.NDArray[Any]) -> RoutedExperts:
        """Make a record of what a server sent: whole numbers of tokens, layers and experts, in this order.

        Raises:
            ValueError: there are not so many for each token, or one of them is no expert.
        """
        per_token = self.num_layers * self.sizes.top_k
        if found.dtype.kind not in "iu" or found.size % per_token:
            raise ValueError(f"{found.size} experts of type {found.dtype} are not {per_token} for each token")
        chosen = found.reshape(-1, self.num_layers, self.sizes.top_k)[:, list(self.layers)]
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.sizes.num_experts:
            raise ValueError(
                f"an expert is none of {self.sizes.num_experts}: {int(chosen.min())} to {int(chosen.max())}"
            )
        made = RoutedExperts.of(chosen, self.sizes.num_experts)
        made.ids()
        return made


def record_of(
    routers: ServedRouters,
    found: npt.NDArray[Any] | None,
    request: GenerationRequest,
    prefix: Prefix | None,
    num_tokens: int,
) -> RoutedExperts | None:
    """Make the record of a completion, the prompt and what was kept of it included.

    Args:
        routers: of the model.
        found: what the server sent; None: nothing, as of an answer that was aborted.
        request: that was asked.
        prefix: what was kept of the completion, whose tokens keep their experts.
        num_tokens: of the completion, those that were kept included.

    Returns:
        Of all tokens but the last; None where the server sent nothing, or nothing was sampled.

    Raises:
        ValueError: what it sent is of fewer tokens, or as of ``ServedRouters.record``.
    """
    wanted = len(request.prompt_ids) + num_tokens - 1
    if found is None or not num_tokens:
        return None
    made = routers.record(found)
    if made.num_tokens < wanted:
        raise ValueError(f"experts of {made.num_tokens} tokens came with {wanted + 1} tokens")
    return joined(None if prefix is None else prefix.experts, made.part(0, wanted))
