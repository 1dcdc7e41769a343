"""Policy losses per token, from a config section to [T] values."""

from services.trainer.algorithms.losses.dispatch import policy_loss
from services.trainer.algorithms.losses.token_loss import TokenLoss

__all__ = ["TokenLoss", "policy_loss"]
