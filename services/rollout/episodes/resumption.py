"""What of a group that was handed over may be used; pure functions.

A finished member is kept whole, or sampled afresh; an unfinished one becomes a prefix, of which the engine decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flotilla.services.rollout.engines.base import UNMIXED, Prefix, ResumeRule
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig, OnWeightUpdate
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Trajectory
from flotilla.shared.streams.partials import Partials, is_finished


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is of a group.

    Attributes:
        finished: members that are not sampled again, by index.
        prefixes: tokens of the others, by index; a member that is in neither starts with nothing.
    """

    finished: dict[int, Trajectory]
    prefixes: dict[int, Prefix]


def resume_rule(asynchrony: AsynchronyConfig) -> ResumeRule:
    """Decide which tokens of an earlier rollout may be kept in an experiment.

    Where old groups are dropped, a token that the next publication would make too old is not worth keeping; where
    the trainer paces itself, it waits for such a group.
    """
    bound = asynchrony.resolved_max_lag
    is_dropped = asynchrony.on_max_lag == "drop" and bound > 0
    return ResumeRule(
        mixes_versions=asynchrony.on_weight_update is not OnWeightUpdate.DRAIN, max_lag=bound - is_dropped
    )


def rule_of(task: Task, rule: ResumeRule) -> ResumeRule:
    """Decide which tokens a task may keep: a pinned one those of its version alone."""
    return rule if task.pinned_version is None else UNMIXED


def begun(
    task: Task, partials: Partials, prompt_ids: Sequence[int], rule: ResumeRule, serving: int, max_new_tokens: int
) -> Begun:
    """Sort out what a group was handed over with.

    Args:
        task: what is to be answered.
        partials: what there is of its members.
        prompt_ids: the prompt as it is rendered here; tokens behind another one are of no use.
        rule: of the task.
        serving: the version that serves now.
        max_new_tokens: of the completion, the tokens that it has already included.
    """
    found = Begun({}, {})
    for index, member in enumerate(partials):
        if member is None or not _fits(member, prompt_ids, task):
            continue
        runs = _completion_runs(member, len(prompt_ids))
        if is_finished(member):
            # Nothing is added to it, so it mixes nothing; only its age counts, and a pinned version.
            is_pinned = task.pinned_version is not None
            if rule.allows(runs, serving) if is_pinned else serving - min(v for _, v in runs) <= rule.max_lag:
                found.finished[index] = member
        elif member.num_sampled < max_new_tokens:
            start = len(prompt_ids)
            log_probs = tuple(member.log_probs[start:].tolist())
            sampled = tuple(member.token_ids[start:].tolist())
            found.prefixes[index] = Prefix(sampled, log_probs, runs, member.experts)
    return found


def _fits(member: Trajectory, prompt_ids: Sequence[int], task: Task) -> bool:
    """Check that a member is this prompt and then one completion, of no version that is older than the task."""
    num_prompt = len(prompt_ids)
    is_same_prompt = np.array_equal(member.token_ids[:num_prompt], np.asarray(prompt_ids, dtype=np.int32))
    is_one_completion = not member.loss_mask[:num_prompt].any() and bool(member.loss_mask[num_prompt:].all())
    oldest = min(version for _, version in member.versions)
    return is_same_prompt and is_one_completion and member.num_sampled > 0 and oldest >= task.min_version


def _completion_runs(member: Trajectory, num_prompt: int) -> tuple[tuple[int, int], ...]:
    return tuple((max(start - num_prompt, 0), version) for start, version in member.versions)
