"""How many groups may be issued now: the admission budget, and what is left to train. Pure.

The budget bounds how far generation runs ahead; what is left bounds the end, so that the last steps do not sample
groups that nobody will train. A group that is filtered, dropped or failed is replaced, since it counts for neither.
"""

from shared.streams.ledger import Ledger


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


def admitted(ledger: Ledger, *, budget: int, steps: int, groups_per_step: int) -> int:
    """Count the groups that may be issued now."""
    left = groups_left(ledger, steps=steps, groups_per_step=groups_per_step)
    return min(left, budget_left(ledger, budget=budget))
