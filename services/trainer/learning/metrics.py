"""Names and definitions of what an update reports. A metric of a ratio of sums is computed from the sums."""

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "kl_loss": "loss/kl",
    "supervised_loss": "loss/supervised",
    "value_loss": "loss/value",
    "value": "value/mean",
    "value_clip_fraction": "value/clip_fraction",
    "kl": "kl/mean",
    "distillation_kl": "distillation/kl",
    "ratio": "ratio/mean",
    "approx_kl": "ratio/approx_kl",
    "clip_fraction": "ratio/clip_fraction",
    "clip_fraction_lower": "ratio/clip_fraction_lower",
    "advantage": "advantage/mean",
    "advantage_squared": "advantage/mean_square",
    "advantage_clip_fraction": "advantage/clip_fraction",
    "flat_group_fraction": "groups/flat_fraction",
    "group_std": "reward/std_within_group",
}
SUMS_OVER_UPDATES = ("loss", "policy_loss", "kl_loss", "supervised_loss", "value_loss", "router/balance", "router/z")
"""Reported per update: their tallies add up over the updates of a step."""


def mean_of_updates(summary: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Divide what was summed over a step's updates by their number."""
    return {
        name: value / num_updates if name in SUMS_OVER_UPDATES and num_updates else value
        for name, value in summary.items()
    }


def algorithm_names(summary: Mapping[str, float]) -> dict[str, float]:
    """Give the algorithms' figures the names they are reported under; ``score`` is reported as the reward."""
    return {RENAMED.get(name, name): value for name, value in summary.items() if name != "score"}
