"""Keeps what is known of a task that fails in a rollout, so that people can see which prompt it was, and why."""

import logging
from dataclasses import replace

import numpy as np

from flotilla.services.rollout.episodes.rendering import Renderer, rendered
from flotilla.shared.samples.recorder import KeepsEnded
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, GradeStatus, Group, Trajectory
from flotilla.shared.streams.partials import Partials

log = logging.getLogger(__name__)

LONGEST_PROMPT = 4096
"""Tokens that are kept of a prompt that was not answered: it may have failed because it has millions."""


class FailedSamples:
    """Keeps tasks that fail here: the prompt, and what earlier rollouts handed over of its answers.

    Args:
        kept: their receiver.
        renderer: renders prompts as the engine is given them.
    """

    def __init__(self, kept: KeepsEnded, renderer: Renderer) -> None:
        self._kept = kept
        self._renderer = renderer

    def keep(self, task: Task, partials: Partials, reason: str, detail: str) -> None:
        """Keep a task that has failed.

        Args:
            task: what was to be answered.
            partials: what its members had.
            reason: as the ledger has it.
            detail: why, in words.
        """
        self._kept.ended(unanswered(task, partials, self._renderer, detail), SampleKind.FAILED, reason)


def unanswered(task: Task, partials: Partials, renderer: Renderer, detail: str) -> Group:
    """Make the group of a task that was not answered: of its members those that have tokens, else one without."""
    had = [replace(each, status=GradeStatus.ERROR, reason=detail) for each in partials if each is not None]
    try:
        token_ids = rendered(renderer, task.shown_messages)[0][:LONGEST_PROMPT]
        prompt = renderer.text(token_ids, with_special_tokens=True)
    except Exception as error:  # Whatever the template raises may be why the task failed.
        log.debug("the prompt of a failed task cannot be rendered", extra={"error": repr(error)})
        token_ids, prompt = (), "\n\n".join(message.content for message in task.messages)
    return Group(task, tuple(had) or (_nothing(token_ids, detail),), prompt)


def _nothing(prompt_ids: tuple[int, ...], detail: str) -> Trajectory:
    ids = np.asarray(prompt_ids or (0,), dtype=np.int32)
    return Trajectory(
        token_ids=ids,
        loss_mask=np.zeros(len(ids), dtype=np.uint8),
        log_probs=np.zeros(len(ids), dtype=np.float32),
        versions=((0, NO_VERSION),),
        finish_reason=FinishReason.ABORTED,
        status=GradeStatus.ERROR,
        reason=detail,
    )
