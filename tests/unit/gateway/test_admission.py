from hypothesis import given
from hypothesis import strategies as st

from flotilla.services.gateway.feeder.admission import admitted, budget_left, groups_left
from flotilla.shared.streams.ledger import HopCounts, Ledger


def test_the_budget_counts_what_is_outstanding_and_what_was_consumed_since_the_publication() -> None:
    assert budget_left(Ledger(outstanding=3, consumed_since_publication=2), budget=8) == 3
    assert budget_left(Ledger(outstanding=6, consumed_since_publication=6), budget=8) == 0


def test_no_more_is_issued_than_the_remaining_steps_train() -> None:
    ledger = Ledger(issued=9, planned=4, trained=2, outstanding=3)

    assert groups_left(ledger, steps=5, groups_per_step=2) == 1
    assert groups_left(ledger, steps=4, groups_per_step=2) == 0


def test_what_is_filtered_dropped_or_failed_is_replaced() -> None:
    whole = Ledger(issued=4, outstanding=4)
    lossy = Ledger(issued=4, outstanding=1, filtered={"same_reward": 1}, dropped={"too_old": 1}, failed={"timeout": 1})

    assert admitted(whole, budget=4, steps=1, groups_per_step=4) == 0
    assert admitted(lossy, budget=4, steps=1, groups_per_step=4) == 3


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 6), st.lists(st.integers(0, 4), max_size=60))
def test_every_step_gets_its_groups_and_none_is_issued_in_vain(
    groups_per_step: int, steps: int, slack: int, moves: list[int]
) -> None:
    # An on-policy trainer: it consumes a step's groups when they are there, then publishes. Losses are replaced.
    budget = groups_per_step + slack - 1
    issued = outstanding = trained = lost = 0
    consumed = 0

    def state() -> Ledger:
        return Ledger(outstanding=outstanding, trained=trained, consumed_since_publication=consumed)

    for move in [*moves, *[0, 1] * (2 * steps * groups_per_step)]:
        if move == 0:
            count = admitted(state(), budget=budget, steps=steps, groups_per_step=groups_per_step)
            issued, outstanding = issued + count, outstanding + count
        elif move == 1 and outstanding >= groups_per_step and trained < steps * groups_per_step:
            outstanding, trained, consumed = outstanding - groups_per_step, trained + groups_per_step, 0
        elif move == 2 and outstanding:
            outstanding, lost = outstanding - 1, lost + 1
        assert outstanding + consumed <= budget

    assert trained == steps * groups_per_step
    assert issued == trained + lost + outstanding and outstanding == 0


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.lists(st.integers(0, 3), max_size=80))
def test_redundant_groups_are_issued_only_while_finished_ones_do_not_fill_the_budget(
    groups_per_step: int, steps: int, redundant: int, moves: list[int]
) -> None:
    # On-policy: a step trains the first groups that are finished, and its publication ends all others.
    sampled = finished = trained = 0
    for move in [*moves, *[0, 1] * (4 * steps * groups_per_step)]:
        ledger = Ledger(claimed=HopCounts(tasks=sampled), outstanding=sampled + finished, trained=trained)
        if move == 0:
            count = admitted(
                ledger, budget=groups_per_step, steps=steps, groups_per_step=groups_per_step, redundant=redundant
            )
            assert sampled + finished + count <= max(sampled + finished, groups_per_step - 1 + max(redundant, 1))
            assert not count or finished < groups_per_step
            sampled += count
        elif move == 1 and sampled:
            sampled, finished = sampled - 1, finished + 1
        if finished >= groups_per_step and trained < steps * groups_per_step:
            sampled, finished, trained = 0, 0, trained + groups_per_step

    assert trained == steps * groups_per_step
    assert sampled == finished == 0, "nothing is issued for a step that does not come"


def test_a_step_that_waits_for_few_gets_others_to_wait_for() -> None:
    waiting = Ledger(claimed=HopCounts(tasks=1), waiting=HopCounts(scored=3), outstanding=4)
    ready = Ledger(waiting=HopCounts(scored=4), outstanding=4)
    sizes = {"budget": 4, "steps": 9, "groups_per_step": 4}

    assert admitted(waiting, **sizes) == 0
    assert admitted(waiting, **sizes, redundant=3) == 2
    assert admitted(ready, **sizes, redundant=3) == 0, "there is enough"
