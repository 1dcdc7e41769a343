"""The losses of the Tinker API: of one sequence each, sums over its tokens that the caller has normalised.

``p`` is the policy that is trained, ``q`` the one that sampled, ``A`` the advantage of a token. Source: the Tinker
documentation, "Loss functions", 2026.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from flotilla.shared.errors import InvalidRequest

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
DEFAULT_LOW, DEFAULT_HIGH = 0.8, 1.2
DEFAULT_BETA: Final = 0.05
RATIO_MASK: Final = "sequence_ratio_mask"
TRUNCATED_AT: Final = 2.0
"""Largest importance weight of ``stable_reinforce``."""

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float | str]


def token_losses(name: str, log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute the loss of each token; their sum is differentiated.

    Args:
        name: of the loss.
        log_probs: [T] or [T, K] nats of the targets, under the weights being trained, with gradient.
        inputs: of the loss, in the shape of ``log_probs``: weights, or logprobs (under q) and advantages.
        config: its parameters.

    Returns:
        The same shape, float32.

    Raises:
        InvalidRequest: there is no such loss, or an input is missing or has another shape.
    """
    if name not in LOSSES:
        raise InvalidRequest(f"loss_fn {name!r} is not served: {', '.join(LOSSES)}")
    return LOSSES[name](log_probs, inputs, config)


def cross_entropy(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-w log p``; K targets of a position, each with its weight, make a soft target."""
    weights = _input("weights", inputs, log_probs) if "weights" in inputs else torch.ones_like(log_probs)
    return -log_probs * weights


def importance_sampling(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-(p / q) A``."""
    ratio, advantages = _ratio(log_probs, inputs)
    return -ratio * advantages


def ppo(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-min(r A, clip(r, low, high) A)`` with ``r = p / q``. Source: Schulman et al., PPO, 2017."""
    ratio, advantages = _ratio(log_probs, inputs)
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, config) * advantages)


def cispo(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-sg(clip(p / q, low, high)) A log p``. Source: MiniMax, CISPO, 2025."""
    ratio, advantages = _ratio(log_probs, inputs)
    return -_clipped(ratio, inputs, config).detach() * advantages * log_probs


def dro(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-(A log p - beta / 2 (log p / q)^2)``. Source: Richemond et al., DRO, 2024."""
    sampled, advantages = _input("logprobs", inputs, log_probs), _input("advantages", inputs, log_probs)
    beta = _number("beta", config, DEFAULT_BETA)
    return -(advantages * log_probs - 0.5 * beta * (log_probs - sampled).square())


def gspo(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-min(s A, clip(s, low, high) A)``; the gradient of s is spread over tokens.

    s is ``exp`` of the mean of ``log p / q`` over the tokens of ``sequence_ratio_mask``, 1 outside of it.
    Source: Zheng et al., GSPO-token, 2025.
    """
    sampled, advantages = _input("logprobs", inputs, log_probs), _input("advantages", inputs, log_probs)
    mask = _input(RATIO_MASK, inputs, log_probs) if RATIO_MASK in inputs else torch.ones_like(log_probs)
    log_ratio = ((log_probs - sampled) * mask).sum() / mask.sum().clamp(min=1)
    # As large as the sequence's ratio, with the gradient of the token's own log-probability.
    ratio = torch.where(mask > 0, (log_ratio.detach() + log_probs - log_probs.detach()).exp(), 1.0)
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, config) * advantages)


def stable_reinforce(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Compute ``-sg(min(p / q, 2)) A log p``: a declared stand-in, truncated importance sampling by token.

    What the hosted service computes under this name is not published. Source: Ionides, JCGS 17(2), 2008.
    """
    ratio, advantages = _ratio(log_probs, inputs)
    return -ratio.clamp(max=TRUNCATED_AT).detach() * advantages * log_probs


LOSSES: Final[Mapping[str, Callable[[Tensor, Inputs, Config], Tensor]]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def _ratio(log_probs: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    sampled, advantages = _input("logprobs", inputs, log_probs), _input("advantages", inputs, log_probs)
    return (log_probs - sampled).exp(), advantages


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    bounds = [
        _input(name, inputs, ratio) if name in inputs else torch.full_like(ratio, _number(name, config, default))
        for name, default in ((LOW, DEFAULT_LOW), (HIGH, DEFAULT_HIGH))
    ]
    return torch.clamp(ratio, bounds[0], bounds[1])


def _number(name: str, config: Config, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, str):
        raise InvalidRequest(f"loss_fn_config: {name} must be a number, got {value!r}")
    return value


def _input(name: str, inputs: Inputs, like: Tensor) -> Tensor:
    if name not in inputs:
        raise InvalidRequest(f"loss_fn_inputs lacks {name}, which this loss needs")
    found = inputs[name]
    if found.shape != like.shape:
        raise InvalidRequest(f"loss_fn_inputs: {name} has the shape {list(found.shape)}, targets {list(like.shape)}")
    return found
