"""Rewards that are compared with all of the run so far."""

from collections.abc import Sequence

import pytest
import torch

from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.advantage import ReinforceConfig
from flotilla.shared.statistics.moments import RunningMoments


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


def advantages_of(steps: Sequence[Sequence[float]], config: ReinforceConfig) -> list[list[float]]:
    moments, found = RunningMoments(), []
    for scores in steps:
        inputs = AdvantageInputs(
            PackedSequences.of(torch.arange(len(scores)), torch.ones(len(scores))),
            torch.tensor(scores),
            moments=moments,
        )
        made = compute_advantages(config, inputs)
        moments = made.moments
        found.append(made.advantages.tolist())
    return found


def test_a_step_is_compared_with_itself_and_all_steps_before() -> None:
    config = ReinforceConfig(baseline="batch_mean", divide_by_std=True, compared_with="run")

    first, second = advantages_of([[1.0, 3.0], [2.0, 6.0]], config)

    # 1 and 3: mean 2, deviation sqrt(2). 1, 3, 2 and 6: mean 3, squares 4 + 0 + 1 + 9 = 14, deviation sqrt(14 / 3).
    close(first, [-1 / 2**0.5, 1 / 2**0.5])
    close(second, [-1 / (14 / 3) ** 0.5, 3 / (14 / 3) ** 0.5])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ReinforceConfig(baseline="batch_mean", compared_with="run"), [-1.0, 3.0]),
        (ReinforceConfig(divide_by_std=True, compared_with="run"), [2 / (14 / 3) ** 0.5, 6 / (14 / 3) ** 0.5]),
        (ReinforceConfig(baseline="batch_mean", divide_by_std=True, compared_with="run", score_clip=(-1, 1)),
         [-1 / (14 / 3) ** 0.5, 1.0]),
    ],
    ids=["mean", "deviation", "bounded"],
)  # fmt: skip
def test_mean_and_deviation_are_each_taken_if_asked_for(config: ReinforceConfig, expected: list[float]) -> None:
    close(advantages_of([[1.0, 3.0], [2.0, 6.0]], config)[1], expected)


def test_rewards_that_were_always_the_same_have_no_advantage() -> None:
    config = ReinforceConfig(baseline="batch_mean", divide_by_std=True, compared_with="run")

    assert advantages_of([[0.1] * 3, [0.1] * 7, [0.1]], config) == [[0.0] * 3, [0.0] * 7, [0.0]]


def test_what_compares_with_nothing_is_not_compared_with_the_run() -> None:
    with pytest.raises(ValueError, match=r"compared_with run has no effect while advantage\.baseline is none"):
        ReinforceConfig(compared_with="run")
