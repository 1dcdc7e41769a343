"""The reward that an agent from outside gives its episode, at its end or within a window after it."""

import asyncio
from collections.abc import Sequence

from pydantic import ValidationError

from flotilla.shared.schemas.episode import EpisodeReward
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.streams.mailbox import Mailbox, wait_for_answer


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
