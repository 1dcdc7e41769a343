"""Policy losses per token, from a config section to [T] values."""

from flotilla.services.trainer.algorithms.losses.covariance import select_by_covariance
from flotilla.services.trainer.algorithms.losses.dispatch import policy_loss
from flotilla.services.trainer.algorithms.losses.token_loss import TokenLoss

__all__ = ["TokenLoss", "policy_loss", "select_by_covariance"]
