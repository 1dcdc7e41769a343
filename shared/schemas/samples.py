"""Samples as they are read over REST: what was asked for, and what was found."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from shared.samples.kinds import SampleKind
from shared.schemas.trajectory import GradeStatus
from shared.schemas.wire import Wire


class SampleOrder(StrEnum):
    """Which samples come first."""

    NEWEST = "newest"
    """By when they were written, newest first; in the order of their file."""
    BEST = "best"
    """By reward, greatest first; those without one are left out."""
    WORST = "worst"
    """By reward, smallest first; those without one are left out."""


class SampleQuery(Wire):
    """Which samples are wanted; what is None is not asked for."""

    step: int | None = None
    """Of this trained step, or of the evaluations of the version that it made."""
    kinds: tuple[SampleKind, ...] = ()
    """Any of these; all if empty."""
    row: int | None = None
    """Of this row of the dataset: the problem."""
    group: int | None = None
    """Of the group of this id."""
    status: GradeStatus | None = None
    is_failure: bool = False
    """Only samples of failed groups, and those whose grading failed."""
    min_reward: float | None = Field(None, allow_inf_nan=False)
    max_reward: float | None = Field(None, allow_inf_nan=False)
    order: SampleOrder = SampleOrder.NEWEST


class SampleView(Wire):
    """One sample."""

    id: str
    """File, group's place in it and member: names this sample among all of the experiment."""
    kind: SampleKind
    step: int | None
    version: int
    group_id: int
    member: int
    row: int
    data_source: str | None
    label: str | None
    messages: tuple[Mapping[str, Any], ...]
    prompt: str
    completion: str
    finish_reason: str
    status: GradeStatus
    reward: float | None
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    reason: str | None
    """What the grader said."""
    answer: str | None
    ended: str | None
    """Why the group was filtered or dropped, or failed."""
    num_sampled: int
    turns: tuple[Mapping[str, Any], ...] = ()
    """Of an episode, one after the other: ``observation``, ``text``, ``reward``, ``finish_reason``, positions."""
    is_baseline: bool = False
    """It was answered greedily for the others to be compared with, and is not trained."""
    oldest_version: int
    """That sampled a token."""
    newest_version: int
    lag: int | None = None
    """The greatest of a trained token, in versions."""
    advantage: float | None = None
    """Mean over the sampled tokens; None of what was not trained."""
    timings: Mapping[str, float]
    tokens: Mapping[str, Any] | None = None
    """Per token, where asked for: the columns of lists in ``docs/samples.md``, null where there is no value."""


class SamplePage(Wire):
    """One page of samples; ``next`` is the cursor of the following one, or None."""

    items: tuple[SampleView, ...]
    next: str | None = None
    num_files: int = 0
    num_unread: int = 0
    """Of the files, those that are not in the index yet: ask again soon for what may be in them."""
