"""Samples as they are read over REST."""

from collections.abc import Mapping
from typing import Any

from flotilla.shared.schemas.grade_status import GradeStatus
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.wire import TolerantWire


class SampleView(TolerantWire):
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
    """Per token, where asked for: the columns of lists in ``docs/samples.md``, null where there is no value; and
    ``texts`` of the tokens, where the gateway can read the model's ``tokenizer.json``."""


class SamplePage(TolerantWire):
    """One page of samples; ``next`` is the cursor of the following one, or None."""

    items: tuple[SampleView, ...]
    next: str | None = None
    num_files: int = 0
    num_unread: int = 0
    """Of the files, those that are not in the index yet: ask again soon for what may be in them."""
