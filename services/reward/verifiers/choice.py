"""The letter that was chosen among several, found where models write it; every pattern is linear in the text."""

import re
from collections.abc import Sequence

from flotilla.services.reward.verifiers.base import NO_LABEL, verdict
from flotilla.services.reward.verifiers.exact import last_match
from flotilla.shared.config.sections.reward import ChoiceConfig
from flotilla.shared.schemas.grading import Grade, GradingSample

GAP = r"[\s*_:(\[$]{0,12}"
"""What may be between the words and the letter: white space, emphasis, a colon, an opening bracket."""


class ChoiceVerifier:
    """Compares the last letter that the response gives as its answer with the label's."""

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config
        letter = rf"([{config.letters}])(?![A-Za-z0-9'])"
        marks = (r"\\boxed\{\s{0,4}(?:\\text\{)?", "<answer>", r"\b(?i:answer|choice|option)\b(?:\s{1,4}(?i:is|are))?")
        self._marked = config.pattern or f"(?:{'|'.join(marks)}){GAP}{letter}"
        self._alone = re.compile(rf"\s*[(\[]?{letter}(?:[)\].:,]|\s*$)")

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right if the letters are the same, wrong if the response gives none."""
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""

    def _grade(self, sample: GradingSample) -> Grade:
        if sample.label is None:
            return Grade.error(NO_LABEL)
        expected = self._at_the_start(sample.label) or last_match(self._marked, sample.label)
        if expected is None:
            return Grade.error(f"the label is none of the letters {self._config.letters}: {sample.label[:80]!r}")
        answer = last_match(self._marked, sample.response)
        if answer is None and self._config.pattern is None:
            answer = self._at_the_start(sample.response)
        is_correct = answer is not None and answer.strip() == expected.strip()
        return verdict(self._config, is_correct=is_correct, answer=answer)

    def _at_the_start(self, text: str) -> str | None:
        """Find the letter of ``B``, ``(B)``, ``B.`` or ``B) Paris``."""
        found = self._alone.match(text)
        return found.group(1) if found else None
