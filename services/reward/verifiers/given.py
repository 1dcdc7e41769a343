"""Rewards that are given: by the spec, by the environment, or by an agent with its episode or later."""

import asyncio
from collections.abc import Sequence
from math import fsum

from pydantic import ValidationError

from flotilla.services.reward.verifiers.base import SampleVerifier
from flotilla.shared.config.sections.reward import ConstantConfig
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
    """Looks at nothing."""

    def __init__(self, config: ConstantConfig) -> None:
        self._config = config

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample with the reward that the spec names."""
        return Grade.scored(self._config.value)


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
