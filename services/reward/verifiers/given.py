"""Rewards that are given: by the spec, by the environment, or by an agent with its episode or later."""

import asyncio
import zlib
from collections.abc import Sequence
from functools import partial
from math import fsum
from pathlib import Path

from pydantic import ValidationError

from flotilla.services.reward.verifiers.base import SampleVerifier
from flotilla.shared.config.sections.reward import ConstantConfig, RecordedRewardConfig
from flotilla.shared.errors import DataError, InvalidSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.samples.dump import Dump, dump_at
from flotilla.shared.schemas.episode import EpisodeReward
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.streams.mailbox import Mailbox, wait_for_answer


class EnvironmentVerifier(SampleVerifier):
    """Sums the rewards of an episode's turns; abstains where no environment gave any."""

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample."""
        rewards = [turn.reward for turn in sample.turns if turn.reward is not None]
        if not rewards:
            return Grade.abstained("no environment gave a reward")
        return Grade.scored(fsum(rewards))


class ConstantVerifier(SampleVerifier):
    """Ignores the samples."""

    def __init__(self, config: ConstantConfig) -> None:
        self._config = config

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample with the reward that the spec names."""
        return Grade.scored(self._config.value)


class RecordedVerifier:
    """Looks answers up in a dump.

    Args:
        config: where it is, and what becomes of other answers.
        places: where dumps may be; None: anywhere.
    """

    def __init__(self, config: RecordedRewardConfig, places: Places | None = None) -> None:
        self._config = config
        self._check = None if places is None else places.check_file
        self._rewards: dict[tuple[str, str], Grade] = {}
        self._drawn: list[Grade] = []

    async def start(self) -> None:
        """Read the dump.

        Raises:
            InvalidSpec: it cannot be read, or has no reward.
        """
        path = Path(self._config.dump)
        try:
            found = await asyncio.to_thread(partial(dump_at, path, self._check, field="dump"))
            self._rewards = await asyncio.to_thread(_recorded_grades, found)
        except DataError as error:
            raise InvalidSpec(f"reward component of kind recorded: {error.detail}") from error
        if not self._rewards:
            raise InvalidSpec(f"reward component of kind recorded: no answer in {path} has a reward")
        self._drawn = list(self._rewards.values())

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample, after the time that it is to take."""
        await asyncio.sleep(self._config.seconds)
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Forget the dump."""
        self._rewards, self._drawn = {}, []

    def _grade(self, sample: GradingSample) -> Grade:
        found = self._rewards.get((sample.prompt, sample.response))
        if found is not None:
            return found
        if self._config.others == "drawn" and self._drawn:
            return self._drawn[zlib.crc32(sample.id.encode()) % len(self._drawn)]
        return Grade.error(f"{self._config.dump} has no such answer to this prompt")


def _recorded_grades(dump: Dump) -> dict[tuple[str, str], Grade]:
    groups = [dump.group(index) for index in range(len(dump))]
    return {
        (group.prompt, trajectory.text): Grade.scored(trajectory.reward, answer=trajectory.answer)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None
    }


class AgentVerifier:
    """Waits for rewards; each wait ends with the window that the episode's end has set.

    Args:
        mailbox: where gateway and rollouts leave them.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample; branches of one episode have its reward."""
        names = list(dict.fromkeys(each.episode for each in samples if each.episode is not None))
        answers = await asyncio.gather(*(wait_for_answer(self._mailbox, name) for name in names))
        found = dict(zip(names, answers, strict=True))
        return [_grade(None if each.episode is None else found[each.episode]) for each in samples]

    async def aclose(self) -> None:
        """Nothing is held."""


def _grade(answer: bytes | None) -> Grade:
    if answer is None:
        return Grade.abstained("the agent gave no reward within the window")
    try:
        given = EpisodeReward.model_validate_json(answer)
    except ValidationError as error:
        return Grade.error(f"the agent's reward is not valid: {error.errors()[0]['msg']}")
    return Grade.scored(given.reward, metrics=given.metrics)
