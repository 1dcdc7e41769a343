"""Advantages: from a batch's rewards to one number per sampled token."""

from flotilla.services.trainer.algorithms.advantages.compute import AdvantageInputs, Advantages, compute_advantages

__all__ = ["AdvantageInputs", "Advantages", "compute_advantages"]
