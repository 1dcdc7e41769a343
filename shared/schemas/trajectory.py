"""Trajectories and groups: the tokens of an answer exactly as the engine made them.

Token ids are never re-tokenised between the engine and the loss. Every sampled token keeps the log-probability and the
policy version under which it was sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.schemas.task import Task

GROUP_SCHEMA = 1


class FinishReason(StrEnum):
    """Why sampling of a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class GradeStatus(StrEnum):
    """How grading of a sample ended. Only ``scored`` bears a reward."""

    PENDING = "pending"
    SCORED = "scored"
    ABSTAINED = "abstained"
    ERROR = "error"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """All turns of one answer.

    Attributes:
        token_ids: [T] int32, prompt and completions in order.
        loss_mask: [T] uint8, 1 where the policy sampled the token.
        log_probs: [T] float32 nats under the version that sampled the token; 0 where ``loss_mask`` is 0.
        versions: run-length ``(start, version)`` over token positions, first start 0, starts increasing.
            The prompt bears the version of the first sampled token.
        finish_reason: why it ended.
        text: the completion decoded for graders and people; never re-tokenised.
        status, reward, components, reason: the grade; ``reward`` is None unless ``status`` is scored.
        timings: durations in seconds by name (``generation_seconds``, ``grading_seconds``).
        resumed_tokens: sampled tokens that came from an earlier rollout, which handed the task over.
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

    def __post_init__(self) -> None:
        length = self.token_ids.shape[0]
        if not length or self.loss_mask.shape != (length,) or self.log_probs.shape != (length,):
            raise ValueError(f"shapes differ: {self.token_ids.shape}, {self.loss_mask.shape}, {self.log_probs.shape}")
        starts = [start for start, _ in self.versions]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= length:
            raise ValueError(f"versions must start at 0 and increase within {length} tokens, got {self.versions}")
        if not np.isfinite(self.log_probs).all():
            raise ValueError("log_probs must be finite")

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
        """Give the version of each sampled token."""
        sampled: npt.NDArray[np.int64] = self.token_versions()[self.loss_mask.astype(bool)]
        return sampled

    def graded(self, status: GradeStatus, reward: float | None, **grade: Any) -> "Trajectory":
        """Make a copy that bears a grade.

        Raises:
            ValueError: a scored trajectory without a finite reward, or another status with one.
        """
        is_scored = status is GradeStatus.SCORED
        if is_scored != (reward is not None) or (reward is not None and not np.isfinite(reward)):
            raise ValueError(f"status {status} does not go with reward {reward}")
        return replace(self, status=status, reward=reward, **grade)

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it, for msgpack; arrays as little-endian bytes."""
        return {
            "token_ids": self.token_ids.astype("<i4", copy=False).tobytes(),
            "loss_mask": self.loss_mask.astype("u1", copy=False).tobytes(),
            "log_probs": self.log_probs.astype("<f4", copy=False).tobytes(),
            "versions": [list(run) for run in self.versions],
            "finish_reason": self.finish_reason.value,
            "text": self.text,
            "status": self.status.value,
            "reward": self.reward,
            "components": dict(self.components),
            "reason": self.reason,
            "timings": dict(self.timings),
            "resumed_tokens": self.resumed_tokens,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Trajectory":
        """Read what ``to_wire`` made; the arrays are read-only views of the message."""
        return cls(
            token_ids=np.frombuffer(wire["token_ids"], dtype="<i4"),
            loss_mask=np.frombuffer(wire["loss_mask"], dtype="u1"),
            log_probs=np.frombuffer(wire["log_probs"], dtype="<f4"),
            versions=tuple((start, version) for start, version in wire["versions"]),
            finish_reason=FinishReason(wire["finish_reason"]),
            text=wire["text"],
            status=GradeStatus(wire["status"]),
            reward=wire["reward"],
            components=wire["components"],
            reason=wire["reason"],
            timings=wire["timings"],
            # A trajectory that was stored before this field existed was never handed over.
            resumed_tokens=wire.get("resumed_tokens", 0),
        )


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
        sampled = [versions for t in self.trajectories if (versions := t.sampled_versions()).size]
        if not sampled:
            return self.task.min_version, self.task.min_version
        return min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled)

    def rewards(self) -> list[float]:
        """List the rewards of the scored trajectories."""
        return [t.reward for t in self.trajectories if t.reward is not None]

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it, for msgpack."""
        return {
            "schema": GROUP_SCHEMA,
            "task": self.task.to_wire(),
            "prompt": self.prompt,
            "trajectories": [trajectory.to_wire() for trajectory in self.trajectories],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Group":
        """Read what ``to_wire`` made.

        Raises:
            ValueError: the mapping has another schema version.
        """
        if wire.get("schema") != GROUP_SCHEMA:
            raise ValueError(f"group has schema {wire.get('schema')!r}, this version reads {GROUP_SCHEMA}")
        trajectories = tuple(Trajectory.from_wire(each) for each in wire["trajectories"])
        return cls(Task.from_wire(wire["task"]), trajectories, wire["prompt"])
