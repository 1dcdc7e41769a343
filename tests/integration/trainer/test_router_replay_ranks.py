"""What replayed routers learn does not depend on the number of ranks, nor on who has which experts."""

from functools import partial
from typing import Any

import pytest

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.parallel.ranks import ONE_RANK, MeshShape, Ranks
from tests.integration.trainer.ranks import run_ranks
from tests.integration.trainer.test_ranks import _furthest, _made
from tests.unit.trainer.builders import a_spec, uneven_groups
from tests.unit.trainer.test_router_replay import a_mixture, routed

pytestmark = [pytest.mark.timeout(900)]

STEPS = 3
RATE = 1e-2


def replays(ranks: Ranks, modes: list[str]) -> dict[str, Any]:
    """Train by each mode for some steps on this job and alone; how far apart losses, shares and parameters are."""
    found = {}
    for mode in modes:
        one, several = (_trained(mode, each) for each in (None, ranks))
        figures = [
            abs(first[name] - second[name])
            for first, second in zip(one[1], several[1], strict=True)
            for name in ("loss/total", "correction/probability_difference")
        ]
        # A prompt that rows share is counted once in each, and ranks have other rows.
        shares = [
            abs(a["router/disagreement"] - b["router/disagreement"]) for a, b in zip(one[1], several[1], strict=True)
        ]
        found[mode] = {
            "figures": max(figures),
            "parameters": _furthest(one[0], several[0]),
            "shares": max(shares),
            "disagreement": several[1][-1]["router/disagreement"],
        }
    return found


def _trained(mode: str, ranks: Ranks | None) -> tuple[Learner, list[dict[str, float]]]:
    spec = a_spec(
        algorithm={"router_replay": mode, "old_log_probs": "recompute"},
        optimisation={
            "steps": STEPS,
            "groups_per_mini_batch": 2,
            "learning_rate": RATE,
            "micro_batch_tokens": 96,
            "epsilon": 1e-6,
        },
        asynchrony={"require_batches": 2},
    )
    learner = _made(partial(Learner, spec), [a_mixture()], ranks or ONE_RANK)
    figures = []
    for step in range(1, STEPS + 1):
        groups = uneven_groups(seed=step, prompt=6)
        figures.append(dict(learner.train(routed(groups, seed=step) if mode == "R3" else groups, step).metrics))
    return learner, figures


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(2),
        MeshShape(2, expert=2),
        pytest.param(MeshShape(1, tensor=2), marks=pytest.mark.long),
        pytest.param(MeshShape(2, tensor=2, expert=4), marks=pytest.mark.long),
    ],
    ids=["FSDP2", "experts divided", "layers divided", "both divided"],
)
def test_ranks_replay_what_one_rank_replays(shape: MeshShape) -> None:
    first, *_ = run_ranks(replays, ["R2", "R3"], shape)

    for mode, found in first.items():
        assert found["figures"] < 1e-4, mode
        assert found["parameters"] < 0.05 * RATE, mode
        assert found["shares"] < 0.03, mode
        assert found["disagreement"] > 0, mode
