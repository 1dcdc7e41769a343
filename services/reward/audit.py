"""The hidden second grade of a share of the groups: another verifier's, which is never part of the reward.

It is made while the group is held, beside the first, and counted once the group was sent on by the same holder: so a
group that is graded again after a crash is counted by whoever sends it on, and no other.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from flotilla.services.reward.grading import grading_samples, is_gradable
from flotilla.services.reward.verifiers.registry import CombinedVerifier, Surroundings, build_verifier
from flotilla.shared.config.sections.reward import AuditConfig, RewardConfig
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.trajectory import Group

log = logging.getLogger(__name__)

_WHOLE = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Audit:
    """The comparison of a group's second grade with the first.

    Attributes:
        num_compared: samples that both graded.
        differing: members whose grades disagree, with the second.
        num_higher: of them, those whose reward is above the second grade.
        num_missing: samples that the first graded, and the second did not: it failed, or abstained.
        why_missing: words of the second grader about one of them.
    """

    num_compared: int
    differing: tuple[tuple[int, float], ...] = ()
    num_higher: int = 0
    num_missing: int = 0
    why_missing: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether nothing could be compared, though there was something to compare."""
        return not self.num_compared and self.num_missing > 0

    @property
    def missing(self) -> float:
        """Share of the graded samples without a second grade."""
        return self.num_missing / (self.num_compared + self.num_missing) if self.num_missing else 0.0

    @property
    def disagreement(self) -> float:
        """Share of the compared samples whose grades disagree."""
        return len(self.differing) / self.num_compared if self.num_compared else 0.0

    @property
    def higher(self) -> float:
        """Share of the compared samples that the reward is too kind to."""
        return self.num_higher / self.num_compared if self.num_compared else 0.0


def is_audited(group: Group, share: float) -> bool:
    """Whether a group is among those that are graded twice: the same for every service and every attempt."""
    drawn = sha256(f"audit/{group.task.seed}/{group.task.group_id}".encode()).digest()
    return int.from_bytes(drawn[:8]) / _WHOLE < share


def compare(graded: Group, seconds: Sequence[Grade | None], tolerance: float) -> Audit:
    """Hold rewards against second grades.

    Args:
        graded: with the graders' own verdicts, before anything is shaped.
        seconds: per trajectory; None for one that cannot be graded.
        tolerance: difference up to which two grades agree.
    """
    pairs = [
        (member, trajectory.reward, grade.reward)
        for member, (trajectory, grade) in enumerate(zip(graded.trajectories, seconds, strict=True))
        if grade is not None and grade.reward is not None and trajectory.reward is not None
    ]
    differing = [(member, reward, second) for member, reward, second in pairs if abs(reward - second) > tolerance]
    missing = [
        grade
        for trajectory, grade in zip(graded.trajectories, seconds, strict=True)
        if grade is not None and grade.reward is None and trajectory.reward is not None
    ]
    return Audit(
        len(pairs),
        tuple((member, second) for member, _, second in differing),
        sum(reward > second for _, reward, second in differing),
        len(missing),
        next((grade.reason or "it abstained" for grade in missing), None),
    )


class Auditor:
    """Grades a share of the groups a second time.

    Args:
        config: the section.
        verifier: of its components.
    """

    def __init__(self, config: AuditConfig, verifier: CombinedVerifier) -> None:
        self._config = config
        self._verifier = verifier

    async def start(self) -> None:
        """Start what is to be ready before the first sample; see ``CombinedVerifier.start``."""
        await self._verifier.start()

    async def aclose(self) -> None:
        """Release what the graders hold."""
        await self._verifier.aclose()

    def chooses(self, group: Group) -> bool:
        """Whether a group gets a second grade."""
        return is_audited(group, self._config.share)

    async def grades_of(self, group: Group) -> list[Grade | None]:
        """Grade a group's samples as sampled; errors where the graders take too long, or raise.

        A second grade does not affect the group, so no error of it escapes but a cancellation.
        """
        found: list[Grade | None] = [None] * len(group.trajectories)
        wanted = [number for number, each in enumerate(group.trajectories) if is_gradable(each)]
        samples = grading_samples(group)
        try:
            async with asyncio.timeout(self._config.deadline_seconds):
                grades = await self._verifier.score([samples[number] for number in wanted])
        except Exception as error:  # whatever a grader raises
            log.warning("audit failed", extra={"group_id": group.task.group_id, "error": repr(error)})
            grades = [Grade.error(f"audit: {error!r}")] * len(wanted)
        for number, grade in zip(wanted, grades, strict=True):
            found[number] = grade
        return found

    def compare(self, graded: Group, seconds: Sequence[Grade | None]) -> Audit:
        """Hold a group's rewards against its second grades."""
        return compare(graded, seconds, self._config.tolerance)


def build_auditor(config: RewardConfig, surroundings: Surroundings) -> Auditor | None:
    """Make what grades a second time; None where the spec asks for none.

    Raises:
        InvalidSpec: see ``build_component``.
    """
    if config.audit is None:
        return None
    return Auditor(config.audit, build_verifier(RewardConfig(components=config.audit.components), surroundings))
