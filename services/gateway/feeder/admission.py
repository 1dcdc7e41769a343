"""How many groups may be issued now: the admission budget, and what is left to train. Pure.

The budget bounds how far generation runs ahead; what is left bounds the end, so that the last steps do not sample
groups that are never trained. A group that is filtered, dropped or failed is replaced, since it counts for neither.

Redundant groups are issued beyond both, so that a step need not wait for its slowest: while few are being sampled, and
those that are finished do not fill the budget yet.
"""

from flotilla.shared.streams.ledger import Ledger


def groups_left(ledger: Ledger, *, steps: int, groups_per_step: int) -> int:
    """Count the groups that must still be issued so that every step can be filled.

    Args:
        ledger: the train lane.
        steps: steps that this experiment trains itself, from its own beginning to its end.
        groups_per_step: R, groups that one step trains.
    """
    return max(0, steps * groups_per_step - ledger.planned - ledger.trained - ledger.outstanding)


def budget_left(ledger: Ledger, *, budget: int) -> int:
    """Count the groups that the admission budget still admits.

    Args:
        ledger: the train lane.
        budget: R * T * (1 + eta), bound on outstanding + consumed since the last publication.
    """
    return max(0, budget - ledger.outstanding - ledger.consumed_since_publication)


def redundant_left(ledger: Ledger, *, budget: int, steps: int, groups_per_step: int, redundant: int) -> int:
    """Count the groups that may be issued beyond the budget.

    Args:
        ledger: the train lane.
        budget: R * T * (1 + eta).
        steps: steps that this experiment trains itself.
        groups_per_step: R.
        redundant: so many groups are being sampled as long as some are needed.

    Source: ROLL, ``is_use_additional_prompts`` and ``max_additional_running_prompts``.
    """
    sampled = ledger.waiting.tasks + ledger.claimed.tasks
    finished = ledger.outstanding - sampled
    untrained = steps * groups_per_step - ledger.planned - ledger.trained
    needed = min(budget - ledger.consumed_since_publication, untrained)
    return max(0, redundant - sampled) if finished < needed else 0


def admitted(ledger: Ledger, *, budget: int, steps: int, groups_per_step: int, redundant: int = 0) -> int:
    """Count the groups that may be issued now."""
    left = groups_left(ledger, steps=steps, groups_per_step=groups_per_step)
    within = min(left, budget_left(ledger, budget=budget))
    return within or redundant_left(
        ledger, budget=budget, steps=steps, groups_per_step=groups_per_step, redundant=redundant
    )
