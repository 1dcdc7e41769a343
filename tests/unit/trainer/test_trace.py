"""What is kept of a trained step: each token's figures at its place, whatever order the step was trained in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.schemas.sample_kinds import TrainedTokens
from flotilla.shared.schemas.trajectory import Group
from tests.unit.trainer.builders import a_group, a_model, a_spec, uneven_groups


def traced(groups: list[Group], algorithm: dict[str, Any], **optimisation: Any) -> list[tuple[Group, list[Any]]]:
    """Train one step with a learning rate that changes nothing, and return what was found."""
    settings = {"groups_per_mini_batch": 2, "learning_rate": 1e-30, "micro_batch_tokens": 64}
    spec = a_spec(
        algorithm=algorithm, optimisation=settings | optimisation, asynchrony={"require_batches": len(groups) // 2}
    )
    result = Learner(spec, LoadedModel(a_model(), Path())).train(groups, 1)
    assert result.traced is not None
    return list(result.traced.of_groups(groups, lambda version: 7 - version))


def recomputed(group: Group, member: int) -> np.ndarray:
    ids = torch.from_numpy(group.trajectories[member].token_ids.astype(np.int64))
    with torch.no_grad():
        log_probs = a_model()(ids[None]).logits[0].log_softmax(-1)
    found = np.full(len(ids), np.nan, np.float32)
    found[1:] = log_probs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    return np.where(group.trajectories[member].loss_mask.astype(bool), found, np.nan)


@pytest.mark.parametrize("optimisation", [{}, {"shuffle": True, "epochs_per_step": 2}], ids=["in order", "shuffled"])
def test_each_token_has_the_log_prob_that_its_update_saw(optimisation: dict[str, Any]) -> None:
    groups = uneven_groups()

    for group, found in traced(groups, {}, **optimisation):
        for member, tokens in enumerate(found):
            assert isinstance(tokens, TrainedTokens)
            np.testing.assert_allclose(tokens.log_probs, recomputed(group, member), atol=1e-4)
            np.testing.assert_array_equal(
                tokens.old_log_probs[~np.isnan(tokens.old_log_probs)],
                group.trajectories[member].log_probs[group.trajectories[member].loss_mask.astype(bool)],
            )
            assert tokens.lags == ((0, 7),)


def test_what_was_not_trained_has_no_figures() -> None:
    flat, mixed = a_group([0.5, 0.5], 0), a_group([1.0, None, 0.0], 1)

    [(_, of_flat), (_, of_mixed)] = traced([flat, mixed], {})

    assert np.nanmax(np.abs(of_flat[0].advantages)) == 0
    assert np.isnan(of_flat[0].log_probs).all(), "no forward pass without an advantage"
    assert of_mixed[1] is None, "an abstention is no sample"
    assert np.nanmin(of_mixed[0].advantages) > 0 > np.nanmax(of_mixed[2].advantages)


def test_clips_and_corrections_are_told_token_by_token() -> None:
    groups = [a_group([1.0, 0.0], 0), a_group([1.0, 0.0], 1)]
    clip = {"policy_loss": {"kind": "ppo", "clip_low": 1e-6, "clip_high": 1e-6}}

    of_clip = traced(groups, clip)
    corrected = {"old_log_probs": "recompute", "correction": {"weight": {"level": "token", "upper": 1e-3}}}
    of_correction = traced(groups, corrected)

    for group, found in of_clip:
        for trajectory, tokens in zip(group.trajectories, found, strict=True):
            is_sampled = trajectory.loss_mask.astype(bool)
            ratio = np.exp(tokens.log_probs - tokens.old_log_probs)[is_sampled]
            beyond = np.where(tokens.advantages[is_sampled] > 0, ratio > 1 + 1e-6, ratio < 1 - 1e-6)
            np.testing.assert_array_equal(tokens.clipped[is_sampled].astype(bool), beyond)
            assert (tokens.weights[is_sampled] == 1).all()
    for _, found in of_correction:
        for tokens in found:
            assert np.nanmax(tokens.weights) == pytest.approx(1e-3)
