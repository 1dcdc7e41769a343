"""What is learned does not depend on the number of ranks, nor does what they publish."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from services.trainer.learning.learner import Learner
from services.trainer.models.loading import LoadedModel
from services.trainer.parallel.ranks import Ranks
from shared.weights.flat_parameters import FlatParameters
from shared.weights.image import WeightImage
from shared.weights.parts import write_parts
from shared.weights.sharded_parameters import ShardedParameters
from tests.integration.trainer.ranks import run_ranks
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

pytestmark = [pytest.mark.timeout(400)]

STEPS = 5
RATE = 1e-2
MARGIN = 0.05 * RATE
EXPONENTIAL = {"correction/chi2_seq"}
"""The exponential of a whole sequence's log-ratio, in the thousands here: one last bit of it exceeds the margin."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token mean": {},
    "recomputed, kl in the loss, entropy": {
        "old_log_probs": "recompute",
        "kl": {"placement": "loss"},
        "entropy_coefficient": 0.01,
    },
    "clip_cov": {"policy_loss": {"kind": "clip_cov"}},
    "versions": {"old_log_probs": "recompute_at_version"},
    "critic": {"advantage": {"kind": "gae"}},
}


def equality(ranks: Ranks, algorithms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each algorithm on this job and in this process alone; returns how far apart they end."""
    found = {}
    for name, algorithm in algorithms.items():
        one, several = (_trained(algorithm, each) for each in (None, ranks))
        apart = {
            f"{key} of step {step + 1}": abs(value - several[1][step][key]) / max(1.0, abs(value))
            for step in range(STEPS)
            for key, value in one[1][step].items()
            if key not in EXPONENTIAL
        }
        found[name] = {
            "metrics": max(apart.items(), key=lambda pair: pair[1]),
            "parameters": _furthest(one[0], several[0]),
            "is_image_exact": _is_image_exact(several[0].loaded.model, ranks, a_model()),
        }
    return found


def _trained(algorithm: dict[str, Any], ranks: Ranks | None) -> tuple[Learner, list[dict[str, float]]]:
    spec = a_spec(
        algorithm=algorithm,
        optimisation={"steps": STEPS, "groups_per_mini_batch": 2, "learning_rate": RATE, "micro_batch_tokens": 96},
        asynchrony={"require_batches": 2},
        samples={},
    )
    reference = LoadedModel(a_model(), Path()) if algorithm.get("kl") else None
    arguments: dict[str, Any] = {} if ranks is None else {"ranks": ranks}
    learner = Learner(spec, LoadedModel(a_model(), Path()), reference, **arguments)
    figures = []
    for step in range(1, STEPS + 1):
        result = learner.train(uneven_groups(seed=step), step)
        assert result.traced is not None
        figures.append(
            dict(result.metrics)
            | {"norm": result.updates[-1].grad_norm}
            | {"traced": float(torch.tensor(result.traced._log_probs).nansum())}
        )
    return learner, figures


def _furthest(one: Learner, several: Learner) -> float:
    pairs = zip(one.loaded.model.parameters(), several.loaded.model.parameters(), strict=True)
    return max(float((whole - part.full_tensor()).abs().max().detach()) for whole, part in pairs)


def _is_image_exact(sharded: nn.Module, ranks: Ranks, whole: nn.Module) -> bool:
    """Compare what the ranks write together with what one rank writes of the same weights; ``whole`` is overwritten."""
    with torch.no_grad():
        for plain, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
            plain.copy_(parameter.full_tensor())  # type: ignore[operator]
    flat, weights = FlatParameters(whole), ShardedParameters(sharded, is_leader=ranks.is_leader)
    with WeightImage.create(flat.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        flat.snapshot_into(image)
        expected = bytes(image.view)
    with WeightImage.create(weights.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        image.view[: len(weights.layout.header)] = weights.layout.header
        write_parts(image.mapped, weights.layout, weights.image_parts())
        written = np.stack([np.frombuffer(each, np.uint8) for each in ranks.gather(bytes(image.view))])
    # What a rank does not write stays 0.
    return written.max(0).tobytes() == expected


def test_two_ranks_learn_what_one_learns() -> None:
    first, second = run_ranks(equality, ALGORITHMS)

    assert first == second
    for name, found in first.items():
        assert found["metrics"][1] < 1e-5, (name, found)
        assert found["parameters"] < MARGIN, (name, found)
        assert found["is_image_exact"], (name, found)
