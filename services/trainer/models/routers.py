"""Losses of a mixture's routers: that experts are chosen alike often, and that their logits stay small.

A pass's tokens decide which experts count as chosen, so these losses are means over the passes of a mini-batch, as
Megatron and transformers have them: they depend on how it is cut. No loss is added to another: what a router gives to
its experts is passed on unchanged, and its gradient is joined by that of these losses when it comes back. So it reaches
a router whose weights are sharded, or whose layer is computed a second time for the backward pass.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.services.trainer.algorithms.metrics import Metrics, once
from flotilla.services.trainer.data.packing import ModelInput
from flotilla.shared.config.sections.optimisation import RouterConfig
from flotilla.shared.errors import ModelError

RECORDED = "router_logits"
"""What transformers calls a router's logits among the outputs that a model records."""


class RouterLosses:
    """Joins the gradients of a model's routers by those of their losses.

    Args:
        model: of transformers, before or after its weights are sharded.
        config: coefficients, and the scope of one balance.

    Raises:
        ModelError: it has no routers that choose by softmax.
    """

    def __init__(self, model: nn.Module, config: RouterConfig) -> None:
        self._config = config
        self._tokens: Tensor | None = None
        self._share = 0.0
        self._chosen: dict[int, Tensor] = {}
        self._figures: dict[int, tuple[Tensor, Tensor]] = {}
        routers = _routers_of(model)
        text: Any = getattr(model, "config", None)
        text = text.get_text_config() if text is not None else None
        if not routers or not hasattr(text, "router_aux_loss_coef"):
            raise ModelError(
                f"optimisation.router does not work with {type(model).__name__}, which has no routers that choose "
                "experts by a softmax: leave it out"
            )
        self._top = int(text.num_experts_per_tok)
        for number, (router, position) in enumerate(routers):
            router.register_forward_hook(self._hook(number, position))
        self._num_layers = len(routers)

    @contextmanager
    def counting(self, inputs: ModelInput, share: float) -> Iterator[None]:
        """Join the gradients of the forward and backward pass that are made while the block runs.

        Args:
            inputs: of the pass.
            share: that it is of the mini-batch's passes.
        """
        self._tokens, self._share = _real(inputs.position_ids), share
        self._chosen, self._figures = {}, {}
        try:
            yield
        finally:
            self._tokens = None

    def metrics(self, num_ranks: int) -> Metrics:
        """Tally what the last pass's losses were, without their coefficients; the tallies of all ranks add up."""
        share = self._share / num_ranks
        balances = [(self._weights(layer) * probabilities).sum() for layer, (probabilities, _) in self._figures.items()]
        squares = [square for _, square in self._figures.values()]
        if not balances:
            return {}
        total = torch.stack(balances).sum()
        return {
            "router/balance": once(total * share),
            "router/z": once(torch.stack(squares).mean() * share),
        }

    def _weights(self, layer: int) -> Tensor:
        """Return the balance's derivative by the layer's mean probabilities: [E]."""
        chosen = self._chosen[layer]
        if self._config.scope == "layer":
            return chosen * (len(chosen) / self._top)
        return torch.stack(list(self._chosen.values())).mean(0) * (len(chosen) / self._num_layers)

    def gradients(self, layer: int) -> tuple[Tensor, float]:
        """Return the derivatives of the pass's share of the losses: [E] by mean probabilities, and by the square."""
        return self._weights(layer) * (self._config.balance * self._share), self._config.z * self._share

    def _hook(self, layer: int, position: int) -> Any:
        def joined(module: nn.Module, _: Any, output: Any) -> Any:
            if self._tokens is None or not torch.is_grad_enabled():
                return None
            outputs = list(output) if isinstance(output, tuple) else [output]
            logits = outputs[position if isinstance(output, tuple) else 0]
            carrier = next(
                (at for at, each in enumerate(outputs) if each is not logits and each.is_floating_point()),
                0,
            )
            outputs[carrier] = self._pass_on(layer, logits, outputs[carrier])
            return tuple(outputs) if isinstance(output, tuple) else outputs[0]

        return joined

    def _pass_on(self, layer: int, logits: Tensor, carried: Tensor) -> Tensor:
        assert self._tokens is not None
        real = self._tokens.to(logits.device)
        logits = logits.reshape(-1, logits.shape[-1]).float()
        count = real.sum()
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(self._top, dim=-1).indices, 1.0)
        mean = (probabilities * real[:, None]).sum(0) / count
        square = (logits.logsumexp(-1).square() * real).sum() / count
        # Computed a second time for the backward pass, a layer gives the same again.
        self._chosen[layer] = (chosen * real[:, None]).sum(0) / count
        self._figures[layer] = mean.detach(), square.detach()
        found: Tensor = _Joined.apply(carried, mean, square, self, layer)  # type: ignore[no-untyped-call]
        return found


def balancing(losses: RouterLosses | None, inputs: ModelInput, share: float) -> AbstractContextManager[None]:
    """Let routers learn from the pass that is made while the block runs, if they have losses: see ``counting``."""
    return nullcontext() if losses is None else losses.counting(inputs, share)


def router_metrics(losses: RouterLosses | None, num_ranks: int) -> Metrics:
    """Tally the routers' losses of the last pass as the share of one of so many ranks; nothing where there are none."""
    return {} if losses is None else losses.metrics(num_ranks)


class _Joined(torch.autograd.Function):
    """Nothing forward; backward the losses' gradients beside that of what is passed on."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, mean: Tensor, square: Tensor, losses: RouterLosses, layer: int) -> Tensor:
        ctx.losses, ctx.layer = losses, layer
        ctx.like = mean, square
        return carried.view_as(carried)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, square = ctx.like
        of_mean, of_square = ctx.losses.gradients(ctx.layer)
        return gradients[0], of_mean.to(mean.dtype), torch.full_like(square, of_square), None, None


def _routers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Find the routers, and where in their output the logits are, as transformers records them."""
    found: dict[int, tuple[nn.Module, int]] = {}
    for module in model.modules():
        recorder: Any = (getattr(module, "_can_record_outputs", None) or {}).get(RECORDED)
        kind = getattr(recorder, "target_class", None)
        if kind is not None:
            found |= {id(each): (each, recorder.index) for each in module.modules() if isinstance(each, kind)}
    return list(found.values())


def _real(positions: Tensor) -> Tensor:
    """Return a mask [rows * W] of real tokens, from position ids [rows, W] that begin with 0 in every sequence.

    Padding, on the right, has only zeros; a sequence has two tokens at least. With images there are three axes before.
    """
    if positions.dim() == 3:
        positions = positions.amax(0)
    following = torch.cat([positions[:, 1:], torch.zeros_like(positions[:, :1])], 1)
    return ((positions > 0) | (following == 1)).reshape(-1).float()
