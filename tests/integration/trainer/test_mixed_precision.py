"""FSDP2 computes in bfloat16 and keeps float32: weights, gradients, moments and what is published."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flotilla.services.trainer.models.traits import probe_input
from flotilla.services.trainer.parallel.fsdp import precision_of
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.config.sections.parallelism import MixedPrecisionConfig
from tests.integration.trainer.ranks import run_ranks
from tests.integration.trainer.test_ranks import RATE, _furthest, _trained

pytestmark = [pytest.mark.timeout(900)]

STEPS = 3
CRITIC: dict[str, Any] = {"advantage": {"kind": "gae"}, "old_log_probs": "recompute"}


def narrow(ranks: Ranks, reduce: str) -> dict[str, Any]:
    """Train with a policy and, in the first rank, in float32 alone; returns what was computed in what."""
    policy = precision_of(MixedPrecisionConfig.model_validate({"reduce": reduce}))
    learner, figures = _trained(CRITIC, replace(ranks, precision=policy), steps=STEPS)
    one, expected = _trained(CRITIC, None, steps=STEPS) if ranks.is_leader else (None, figures)
    seen: list[torch.dtype] = []
    layer = learner.loaded.model.model.layers[0].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    learner.policy.statistics(probe_input(learner.loaded.model, learner.device), with_entropy=False)
    handle.remove()
    assert learner.critic is not None
    kept = {**learner.optimizer.state(), **learner.critic.state(), **dict(learner.optimizer.masters)}
    return {
        "figures": figures,
        "losses": [(a["loss/total"], b["loss/total"]) for a, b in zip(figures, expected, strict=True)],
        "parameters": _furthest(one, learner),
        "computed": {str(each) for each in seen},
        "kept": {str(each.dtype) for name, each in kept.items() if not name.startswith("moments/")},
        "layout": str(learner.weights.layout),
        "can_pack": learner.policy.can_pack and learner.policy.has_plain_head,
    }


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_layers_compute_in_bfloat16_and_everything_that_is_kept_is_float32(reduce: str) -> None:
    found, other = run_ranks(narrow, reduce)

    assert found["figures"] == other["figures"], "every rank has the same"
    assert found["computed"] == {"torch.bfloat16"}
    assert found["kept"] == {"torch.float32"}
    assert "bfloat16" not in found["layout"].lower() and "BF16" not in found["layout"]
    assert found["can_pack"], "what a model can is judged by the precision that it computes in"
    first, expected = found["losses"][0]
    assert 0 < abs(first - expected) < 0.02 * max(1.0, abs(expected)), "rounded, and close"
    assert found["parameters"] < 2 * STEPS * RATE, "no update goes further than Adam's steps"
