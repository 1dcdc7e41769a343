"""An answer that must equal the label as text."""

import re
from collections.abc import Sequence

from flotilla.services.reward.verifiers.base import NO_LABEL, verdict
from flotilla.shared.config.sections.reward import ExactConfig
from flotilla.shared.schemas.grading import Grade, GradingSample


def last_match(pattern: str, text: str) -> str | None:
    """Find the first group of the last match of ``pattern``; None if there is no match or the group took no part."""
    found: str | None = None
    for match in re.finditer(pattern, text):
        found = match.group(1)
    return found


class ExactVerifier:
    """Compares text, white space at both ends removed."""

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right if the answer is the label."""
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""

    def _grade(self, sample: GradingSample) -> Grade:
        if sample.label is None:
            return Grade.error(NO_LABEL)
        pattern = self._config.pattern
        answer = sample.response if pattern is None else last_match(pattern, sample.response)
        is_correct = answer is not None and self._plain(answer) == self._plain(sample.label)
        return verdict(self._config, is_correct=is_correct, answer=answer)

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()
