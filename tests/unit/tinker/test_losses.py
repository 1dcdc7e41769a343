"""The losses of the Tinker API against their formulas, written out with numpy."""

import math

import numpy as np
import pytest
import torch

from flotilla.services.trainer.tinker.losses import LOSSES, token_losses
from flotilla.shared.errors import InvalidRequest

P = np.array([-1.0, -0.5, -2.0, -0.1])
Q = np.array([-1.2, -1.5, -1.0, -0.1])
A = np.array([1.0, -2.0, 0.5, 0.0])
R = np.exp(P - Q)


def gradient_of(name: str, inputs: dict[str, np.ndarray], **config: float) -> tuple[np.ndarray, np.ndarray]:
    log_probs = torch.tensor(P, requires_grad=True)
    given = {key: torch.tensor(each) for key, each in inputs.items()}
    found = token_losses(name, log_probs, given, config)
    found.sum().backward()
    assert log_probs.grad is not None
    return found.detach().numpy(), log_probs.grad.numpy()


RL = {"logprobs": Q, "advantages": A}
INSIDE = (R > 0.8) & (R < 1.2)
# With a negative advantage only the lower bound counts, with a positive one the upper.
PASSES = np.where(A > 0, R < 1.2, R > 0.8)


def test_cross_entropy_is_weighted() -> None:
    weights = np.array([1.0, 0.0, 0.5, 2.0])

    losses, gradient = gradient_of("cross_entropy", {"weights": weights})

    assert losses == pytest.approx(-P * weights)
    assert gradient == pytest.approx(-weights)


def test_cross_entropy_without_weights_counts_every_token() -> None:
    assert gradient_of("cross_entropy", {})[0] == pytest.approx(-P)


def test_importance_sampling() -> None:
    losses, gradient = gradient_of("importance_sampling", RL)

    assert losses == pytest.approx(-R * A)
    assert gradient == pytest.approx(-R * A)


def test_ppo_clips_where_that_is_the_smaller_gain() -> None:
    losses, gradient = gradient_of("ppo", RL)

    assert losses == pytest.approx(-np.minimum(R * A, np.clip(R, 0.8, 1.2) * A))
    assert gradient == pytest.approx(np.where(PASSES, -R * A, 0.0))


def test_cispo_keeps_the_gradient_of_what_it_clips() -> None:
    losses, gradient = gradient_of("cispo", RL, clip_low_threshold=0.9, clip_high_threshold=1.5)

    assert losses == pytest.approx(-np.clip(R, 0.9, 1.5) * A * P)
    assert gradient == pytest.approx(-np.clip(R, 0.9, 1.5) * A)


def test_bounds_may_be_given_by_token() -> None:
    low, high = np.array([0.1, 0.1, 0.9, 0.1]), np.array([5.0, 2.0, 5.0, 5.0])

    losses, _ = gradient_of("cispo", RL | {"clip_low_threshold": low, "clip_high_threshold": high})

    assert losses == pytest.approx(-np.clip(R, low, high) * A * P)


def test_dro() -> None:
    losses, gradient = gradient_of("dro", RL, beta=0.3)

    assert losses == pytest.approx(-(A * P - 0.15 * (P - Q) ** 2))
    assert gradient == pytest.approx(-(A - 0.3 * (P - Q)))


def test_gspo_has_one_ratio_for_the_tokens_of_its_mask() -> None:
    mask = np.array([0.0, 1.0, 1.0, 1.0])
    ratio = math.exp(((P - Q) * mask).sum() / 3)

    losses, gradient = gradient_of("gspo", RL | {"sequence_ratio_mask": mask}, clip_high_threshold=9.0)

    assert losses == pytest.approx([-A[0], *(-ratio * A[1:])])
    assert gradient == pytest.approx([0.0, *(-ratio * A[1:])])


def test_stable_reinforce_is_truncated_importance_sampling() -> None:
    losses, gradient = gradient_of("stable_reinforce", RL)

    assert R.max() > 2
    assert losses == pytest.approx(-np.minimum(R, 2.0) * A * P)
    assert gradient == pytest.approx(-np.minimum(R, 2.0) * A)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cross_entropy"}))
def test_a_missing_input_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match="lacks logprobs"):
        token_losses(name, torch.tensor(P), {"advantages": torch.tensor(A)}, {})


def test_another_shape_and_another_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="shape"):
        token_losses("ppo", torch.tensor(P), {"logprobs": torch.tensor(Q[:2]), "advantages": torch.tensor(A)}, {})
    with pytest.raises(InvalidRequest, match="not served"):
        token_losses("nonsense", torch.tensor(P), {}, {})
    with pytest.raises(InvalidRequest, match="number"):
        token_losses("dro", torch.tensor(P), {key: torch.tensor(each) for key, each in RL.items()}, {"beta": "x"})
