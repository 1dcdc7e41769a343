"""Whether a response follows the instruction that its label describes, minus a penalty for repeating itself."""

from collections.abc import Sequence

from flotilla.services.reward.verifiers.base import NO_LABEL
from flotilla.services.reward.verifiers.ifeval_rules import follows, repetition_penalty
from flotilla.shared.config.sections.reward import IfevalConfig
from flotilla.shared.schemas.grading import Grade, GradingSample


class IfevalVerifier:
    """Checks instructions."""

    def __init__(self, config: IfevalConfig) -> None:
        self._config = config

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample; a label that cannot be read is an error."""
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""

    def _grade(self, sample: GradingSample) -> Grade:
        if sample.label is None:
            return Grade.error(NO_LABEL)
        try:
            is_right = follows(sample.response, sample.label)
        except ValueError as error:
            return Grade.error(str(error))
        penalty = repetition_penalty(sample.response, largest=self._config.repetition_penalty)
        verdict = self._config.correct if is_right else self._config.incorrect
        return Grade.scored(verdict + penalty, metrics={"followed": float(is_right), "repetition": penalty})
