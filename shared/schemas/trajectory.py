"""Trajectories and groups: the tokens of an answer exactly as the engine made them.

Token ids are never re-tokenised between the engine and the loss. Every sampled token keeps the log-probability and the
policy version under which it was sampled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla.shared.schemas.grade_status import GradeStatus as GradeStatus
from flotilla.shared.schemas.prompt_image import ImageTable, PromptImage, check_images, read_images
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.turns import FinishReason as FinishReason
from flotilla.shared.schemas.turns import Turn, check_turns

GROUP_SCHEMA = 2
ILLUSTRATED_SCHEMA = 3
"""Of a group with trajectories that list what they were shown: earlier releases would read such images as text."""

NO_VERSION = -1
"""In place of a policy version: no policy sampled the tokens, such as those of an answer that people wrote."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """All turns of one answer.

    Attributes:
        token_ids: [T] int32, prompt and completions in order.
        loss_mask: [T] uint8, 1 where the policy sampled the token.
        log_probs: [T] float32 nats under the version that sampled the token; 0 where ``loss_mask`` is 0.
        versions: run-length ``(start, version)`` over token positions, first start 0, starts increasing.
            The prompt has the version of the first sampled token. ``NO_VERSION`` where no policy sampled.
        finish_reason: why it ended.
        text: the completion decoded for graders and people, of several turns the last; never re-tokenised.
        status, reward, components, reason: the grade; ``reward`` is None unless ``status`` is scored.
        metrics: what graders measured besides the reward, by ``COMPONENT/METRIC``.
        answer: what a grader took for the answer in the text; None if it found none, or does not say.
        timings: durations in seconds by name: ``generation_seconds``, ``grading_seconds``; from the task's issue to
            the end of either by the machines' clocks, ``generated_after_seconds`` and ``graded_after_seconds``.
        resumed_tokens: sampled tokens that came from an earlier rollout, which handed the task over.
        turns: of an episode, one after the other; empty where there is one prompt and one completion.
        episode: of an agent from outside, to whom it belongs; several trajectories may be branches of one.
        is_baseline: it was answered greedily, to compare the others with, and is not trained itself.
        teacher_log_probs: [T] float32 nats of a teacher behind a URL, 0 where ``loss_mask`` is 0; None without one.
        experts: that the engine's routers chose for each token but the last; None where none were recorded.
        rollout: the service that sampled all of it; None if several did, or it is unknown.
        pool: of machines, whose rollout sampled all that was not handed over to it; None where it names none.
        images: all that it was shown, in order, the task's included; empty where it was shown the task's alone, once,
            in its first prompt.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float32]
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    text: str = ""
    status: GradeStatus = GradeStatus.PENDING
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    resumed_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    turns: tuple[Turn, ...] = ()
    is_baseline: bool = False
    episode: str | None = None
    teacher_log_probs: npt.NDArray[np.float32] | None = None
    experts: RoutedExperts | None = None
    rollout: str | None = None
    pool: str | None = None
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        length = self.token_ids.shape[0]
        if not length or self.loss_mask.shape != (length,) or self.log_probs.shape != (length,):
            raise ValueError(f"shapes differ: {self.token_ids.shape}, {self.loss_mask.shape}, {self.log_probs.shape}")
        is_one_run = len(self.versions) == 1 and self.versions[0][0] == 0
        if not is_one_run and not _increases(self.versions, length):
            raise ValueError(f"versions must start at 0 and increase within {length} tokens, got {self.versions}")
        # Counting takes half as long as ``all``, which matters for short answers: every hop makes each of them again.
        if np.count_nonzero(np.isfinite(self.log_probs)) != length:
            raise ValueError("log_probs must be finite")
        taught = self.teacher_log_probs
        if taught is not None and (taught.shape != (length,) or np.count_nonzero(np.isfinite(taught)) != length):
            raise ValueError(f"teacher_log_probs must be {length} finite numbers")
        if self.experts is not None and self.experts.num_tokens != length - 1:
            raise ValueError(
                f"routed experts are of {self.experts.num_tokens} tokens, a trajectory of {length} has {length - 1}"
            )
        if self.turns:
            check_turns(self.turns, length)
        if self.images:
            check_images(self.images, length)

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the policy sampled."""
        # As bool: counting is then ten times faster than a sum, which matters once per group and hop.
        return int(np.count_nonzero(self.loss_mask))

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Expand the run-length versions to [T]."""
        starts = [start for start, _ in self.versions] + [self.token_ids.shape[0]]
        runs = np.array([version for _, version in self.versions], dtype=np.int64)
        expanded: npt.NDArray[np.int64] = np.repeat(runs, np.diff(starts))
        return expanded

    def sampled_versions(self) -> npt.NDArray[np.int64]:
        """Return the version of each sampled token."""
        sampled: npt.NDArray[np.int64] = self.token_versions()[self.loss_mask.astype(bool)]
        return sampled

    def sampled_runs(self) -> list[tuple[int, int]]:
        """List versions in the order of their tokens, each with how many of those were sampled, at least one."""
        ends: list[int | None] = [*(start for start, _ in self.versions[1:]), None]
        runs = zip(self.versions, ends, strict=True)
        counted = [(version, int(np.count_nonzero(self.loss_mask[start:end]))) for (start, version), end in runs]
        return [(version, count) for version, count in counted if count]

    def graded(
        self,
        status: GradeStatus,
        reward: float | None,
        *,
        components: Mapping[str, float] | None = None,
        reason: str | None = None,
        timings: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        answer: str | None = None,
    ) -> "Trajectory":
        """Make a copy that has a grade; components, timings and metrics stay where none are given.

        Raises:
            ValueError: a scored trajectory without a finite reward, or another status with one.
        """
        is_scored = status is GradeStatus.SCORED
        if is_scored != (reward is not None) or (reward is not None and not math.isfinite(reward)):
            raise ValueError(f"status {status} does not go with reward {reward}")
        return _assembled(
            self.token_ids,
            self.loss_mask,
            self.log_probs,
            self.versions,
            self.finish_reason,
            self.text,
            status,
            reward,
            self.components if components is None else components,
            reason,
            self.timings if timings is None else timings,
            self.resumed_tokens,
            self.metrics if metrics is None else metrics,
            answer,
            self.turns,
            self.is_baseline,
            self.episode,
            self.teacher_log_probs,
            self.experts,
            self.rollout,
            self.pool,
            self.images,
        )

    def timed(self, name: str, seconds: float) -> "Trajectory":
        """Make a copy with one more of the timings."""
        return self._changed((_TIMINGS, {**self.timings, name: seconds}))

    def sampled_by(self, rollout: str | None, pool: str | None) -> "Trajectory":
        """Make a copy that names its rollout, unless another had begun it, and the pool that sampled the rest."""
        return self._changed((_ROLLOUT, self.rollout if self.resumed_tokens else rollout), (_POOL, pool))

    def _changed(self, *changes: tuple[int, Any]) -> "Trajectory":
        """Make a copy with other values of some fields, by their numbers; unchecked."""
        values = list(_values(self))
        for number, value in changes:
            values[number] = value
        return _assembled(*values)

    def has_sampled_of(self, other: "Trajectory") -> bool:
        """Return, without reading an array, whether all but the grade is surely the other's."""
        if self is other:
            return True
        return (
            self.token_ids is other.token_ids
            and self.loss_mask is other.loss_mask
            and self.log_probs is other.log_probs
            and self.versions == other.versions
            and self.finish_reason is other.finish_reason
            and self.text == other.text
            and self.resumed_tokens == other.resumed_tokens
            and self.turns == other.turns
            and self.is_baseline == other.is_baseline
            and self.episode == other.episode
            and self.experts is other.experts
            and self.rollout == other.rollout
            and self.pool == other.pool
            and self.images == other.images
        )

    def sampled_to_wire(self, table: ImageTable | None = None) -> dict[str, Any]:
        """Make a plain mapping of all but the grade, for msgpack; arrays as little-endian bytes, not copied.

        Args:
            table: existing images, to which those of this one are added; None: there are none.
        """
        wire = {
            "token_ids": _buffer(self.token_ids, _INT32),
            "loss_mask": _buffer(self.loss_mask, _UINT8),
            "log_probs": _buffer(self.log_probs, _FLOAT32),
            "versions": self.versions,
            "finish_reason": self.finish_reason.value,
            "text": self.text,
            "resumed_tokens": self.resumed_tokens,
        }
        # One prompt and one completion are the same bytes as before there were turns.
        if self.turns:
            wire["turns"] = [turn.to_wire() for turn in self.turns]
        if self.is_baseline:
            wire["is_baseline"] = True
        if self.episode is not None:
            wire["episode"] = self.episode
        if self.experts is not None:
            wire["experts"] = self.experts.to_wire()
        if self.rollout is not None:
            wire["rollout"] = self.rollout
        if self.pool is not None:
            wire["pool"] = self.pool
        if self.images:
            wire["images"], wire["image_data"] = (table or ImageTable()).placed(self.images)
        return wire

    def grade_to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of what a grader or a teacher may set, for msgpack."""
        wire: dict[str, Any] = {
            "status": self.status.value,
            "reward": self.reward,
            "components": dict(self.components),
            "reason": self.reason,
            "timings": dict(self.timings),
            "metrics": dict(self.metrics),
            "answer": self.answer,
        }
        if self.teacher_log_probs is not None:
            wire["teacher_log_probs"] = _buffer(self.teacher_log_probs, _FLOAT32)
        return wire

    def to_wire(self, table: ImageTable | None = None) -> dict[str, Any]:
        """Make a plain mapping of it all, for msgpack; ``table`` as of ``sampled_to_wire``."""
        return self.sampled_to_wire(table) | self.grade_to_wire()

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], known: list[bytes] | None = None) -> "Trajectory":
        """Read what ``to_wire`` made; the arrays are read-only views of the message.

        Args:
            known: images of what was read before, by their number in the table that it was written with; added to.
        """
        received = _assembled(
            np.frombuffer(wire["token_ids"], _INT32),
            np.frombuffer(wire["loss_mask"], _UINT8),
            np.frombuffer(wire["log_probs"], _FLOAT32),
            tuple(map(tuple, wire["versions"])),
            _FINISH_REASONS[wire["finish_reason"]],
            wire["text"],
            _GRADE_STATUSES[wire["status"]],
            wire["reward"],
            wire["components"],
            wire["reason"],
            wire["timings"],
            # A trajectory that was stored before this field existed was never handed over.
            wire.get("resumed_tokens", 0),
            # Nor was one that was graded before these were kept given any.
            wire.get("metrics", {}),
            wire.get("answer"),
            tuple([Turn.from_wire(turn) for turn in wire.get("turns", ())]),
            wire.get("is_baseline", False),
            wire.get("episode"),
            None if (taught := wire.get("teacher_log_probs")) is None else np.frombuffer(taught, _FLOAT32),
            None if (routed := wire.get("experts")) is None else RoutedExperts.from_wire(routed),
            wire.get("rollout"),
            wire.get("pool"),
            read_images(wire["images"], wire["image_data"], [] if known is None else known) if "images" in wire else (),
        )
        received.__post_init__()
        return received


_SETTERS = tuple(getattr(Trajectory, each.name).__set__ for each in fields(Trajectory))
_NAMES = [each.name for each in fields(Trajectory)]
_values = attrgetter(*_NAMES)
_TIMINGS, _ROLLOUT, _POOL = map(_NAMES.index, ("timings", "rollout", "pool"))


def _assembled(*values: Any) -> Trajectory:
    """Make a trajectory of its fields in order, unchecked.

    It takes a third of the time that the class takes, which sets frozen fields by name. Every hop makes each trajectory
    twice, and for short answers that is most of its work.
    """
    made = object.__new__(Trajectory)
    for set_field, value in zip(_SETTERS, values, strict=True):
        set_field(made, value)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A task and the trajectories that answer it, compared with each other.

    Attributes:
        task: what was asked.
        trajectories: its answers, in the order of their seeds.
        prompt: the prompt as the model saw it, for graders and people; never re-tokenised.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    prompt: str = ""

    @property
    def num_tokens(self) -> int:
        """Count all tokens, prompts included."""
        return sum(int(trajectory.token_ids.shape[0]) for trajectory in self.trajectories)

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the policy sampled."""
        return sum(trajectory.num_sampled for trajectory in self.trajectories)

    def version_range(self) -> tuple[int, int]:
        """Find the oldest and the newest version that sampled a token; ``min_version`` twice if none was sampled."""
        versions = [version for each in self.trajectories for version, _ in each.sampled_runs()]
        return (min(versions), max(versions)) if versions else (self.task.min_version, self.task.min_version)

    def timed(self, name: str, now: float) -> "Group":
        """Record in each trajectory how long ago the task was issued; the same group if that is not recorded.

        Args:
            name: of the timing.
            now: seconds since the epoch.
        """
        if not (since := self.since_issue(name, now)):
            return self
        return Group(self.task, tuple([each.timed(name, since[name]) for each in self.trajectories]), self.prompt)

    def since_issue(self, name: str, now: float) -> dict[str, float]:
        """Give how long ago the task was issued, by the name of the timing; nothing if that is not recorded."""
        return {name: max(0.0, now - self.task.issued_at)} if self.task.issued_at else {}

    def sampled_by(self, rollout: str | None, pool: str | None = None) -> "Group":
        """Record the rollout of trajectories that no other has begun, and the pool that sampled the rest of all."""
        return Group(self.task, tuple([each.sampled_by(rollout, pool) for each in self.trajectories]), self.prompt)

    def rewards(self) -> list[float]:
        """List the rewards of the scored trajectories, a baseline's left out."""
        return [t.reward for t in self.trajectories if t.reward is not None and not t.is_baseline]

    def episode_rewards(self) -> list[float]:
        """List the same by episode: one of several branches has their mean, of equal rewards exactly that reward."""
        if all(each.episode is None for each in self.trajectories):
            return self.rewards()
        found: dict[object, list[float]] = {}
        for number, each in enumerate(self.trajectories):
            if each.reward is not None and not each.is_baseline:
                found.setdefault(number if each.episode is None else each.episode, []).append(each.reward)
        return [min(max(fmean(rewards), min(rewards)), max(rewards)) for rewards in found.values()]

    def has_body_of(self, other: "Group") -> bool:
        """Return, without reading an array, whether all but the grades is surely the other's.

        It is where the group was made from the other one by giving its trajectories other grades.
        """
        return (
            self.task is other.task
            and self.prompt == other.prompt
            and len(self.trajectories) == len(other.trajectories)
            and all(map(Trajectory.has_sampled_of, self.trajectories, other.trajectories))
        )

    def body_to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of all but the grades, for msgpack."""
        table = ImageTable(self.task.images)
        return {
            "schema": ILLUSTRATED_SCHEMA if any(each.images for each in self.trajectories) else GROUP_SCHEMA,
            "task": self.task.to_wire(),
            "prompt": self.prompt,
            "trajectories": [trajectory.sampled_to_wire(table) for trajectory in self.trajectories],
        }

    def grades_to_wire(self) -> list[dict[str, Any]]:
        """Make a plain list of the trajectories' grades, for msgpack."""
        return [trajectory.grade_to_wire() for trajectory in self.trajectories]

    @classmethod
    def from_wire(cls, body: Mapping[str, Any], grades: Sequence[Mapping[str, Any]]) -> "Group":
        """Read what ``body_to_wire`` and ``grades_to_wire`` made.

        Raises:
            ValueError: the body has another schema version, or there is not one grade for each trajectory.
        """
        if body.get("schema") not in (GROUP_SCHEMA, ILLUSTRATED_SCHEMA):
            schemas = f"{GROUP_SCHEMA} and {ILLUSTRATED_SCHEMA}"
            raise ValueError(f"group has schema {body.get('schema')!r}, this version reads {schemas}")
        sampled = body["trajectories"]
        if len(grades) != len(sampled):
            raise ValueError(f"{len(grades)} grades do not go with {len(sampled)} trajectories")
        task = Task.from_wire(body["task"])
        known = list(dict.fromkeys(task.images))
        read = [Trajectory.from_wire(each | grade, known) for each, grade in zip(sampled, grades, strict=True)]
        return cls(task, tuple(read), body["prompt"])


_INT32, _UINT8, _FLOAT32 = np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")


# Thrice as fast as asking the class.
_FINISH_REASONS = {each.value: each for each in FinishReason}
_GRADE_STATUSES = {each.value: each for each in GradeStatus}


def _increases(versions: Sequence[tuple[int, int]], length: int) -> bool:
    starts = [start for start, _ in versions]
    return bool(starts) and starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < length


def _buffer(array: npt.NDArray[Any], dtype: "np.dtype[Any]") -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).data
