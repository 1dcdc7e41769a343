"""Held-out rows of a job on finished answers: read from the gateway once, measured at the steps that the spec names."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from flotilla.shared.config.sections.job import HeldOutRowsConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.retry import GATEWAY, retry
from flotilla.shared.schemas.held_out import HeldOutAnswer, HeldOutPage
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, GradeStatus, Group, Trajectory


@runtime_checkable
class Measures(Protocol):
    """A learner from finished answers, or that of every rank of a job."""

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Compute what the loss is on groups that are not trained; blocks."""


class Trains(Protocol):
    """Any learner."""

    spec: ExperimentSpec


class HeldOutLoss:
    """What the loss is on rows that are not trained.

    Args:
        learner: computes it.
        config: how often; None where the job names no rows.
        groups: the rows.
    """

    def __init__(self, learner: Trains, config: HeldOutRowsConfig | None, groups: tuple[Group, ...]) -> None:
        self._learner, self._config, self._groups = learner, config, groups
        self._total_steps = learner.spec.optimisation.steps

    def is_due(self, step: int) -> bool:
        """Whether it is measured after so many steps; before the first one, too."""
        if self._config is None or not self._groups:
            return False
        every = self._config.every_steps
        return step in {0, self._total_steps} or (every is not None and step % every == 0)

    def measure(self) -> Mapping[str, float]:
        """Measure it under the present weights; blocks."""
        assert isinstance(self._learner, Measures), "rows are held out by jobs on finished answers alone"
        return self._learner.measure(self._groups)


async def open_held_out(learner: Trains, gateway: GatewayClient, experiment_id: str) -> HeldOutLoss:
    """Read the held-out rows, if the job has any, waiting for the gateway as long as it takes."""
    job = learner.spec.finished_job
    config = None if job is None else job.held_out
    groups = () if config is None else await _read(gateway, experiment_id)
    return HeldOutLoss(learner, config, groups)


async def _read(gateway: GatewayClient, experiment_id: str) -> tuple[Group, ...]:
    groups: list[Group] = []
    first: int | None = 0
    while first is not None:
        path = f"/v1/experiments/{experiment_id}/held_out_rows"
        answer = await retry(partial(gateway.call, "GET", path, params={"first": first}), waiting_for=GATEWAY)
        page = HeldOutPage.model_validate(answer)
        groups += [_group(len(groups) + number, answers) for number, answers in enumerate(page.rows)]
        first = page.next
    return tuple(groups)


def _group(number: int, answers: tuple[HeldOutAnswer, ...]) -> Group:
    task = Task(group_id=number, row=number, messages=(), group_size=len(answers), seed=0)
    return Group(task, tuple(map(_trajectory, answers)))


def _trajectory(answer: HeldOutAnswer) -> Trajectory:
    made = Trajectory(
        token_ids=np.array(answer.token_ids, dtype=np.int32),
        loss_mask=np.array(answer.loss_mask, dtype=np.uint8),
        log_probs=np.zeros(len(answer.token_ids), dtype=np.float32),
        versions=((0, NO_VERSION),),
        finish_reason=FinishReason.STOP,
    )
    return made.graded(GradeStatus.SCORED, answer.reward)
