"""An answer that must equal the label as a number, compared in decimal so that 0.1 is 0.1."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from flotilla.services.reward.verifiers.base import NO_LABEL, verdict
from flotilla.services.reward.verifiers.exact import last_match
from flotilla.shared.config.sections.reward import NumericConfig
from flotilla.shared.schemas.grading import Grade, GradingSample

MAX_EXPONENT = 400
"""Beyond what a float can hold nothing is an answer; without a bound ``1e999999999`` would take all memory."""


def parse_number(text: str) -> Decimal | None:
    """Read a number as people write it: with thousands separators, a dollar or per cent sign, a final full stop.

    Returns:
        The number; None if the text is not one, is not finite, or has an absurd exponent. ``12%`` reads as 12.
    """
    plain = text.strip().rstrip(".").replace(",", "").replace("$", "").replace(" ", "").removesuffix("%")
    if "_" in plain:
        return None
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) <= MAX_EXPONENT else None


class NumericVerifier:
    """Compares the last number that the pattern finds."""

    def __init__(self, config: NumericConfig) -> None:
        self._config = config
        self._tolerance = Decimal(str(config.tolerance))

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right if the numbers differ by at most the tolerance, wrong if the answer has none."""
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""

    def _grade(self, sample: GradingSample) -> Grade:
        if sample.label is None:
            return Grade.error(NO_LABEL)
        # A label may be a whole worked solution that ends in the answer, as in GSM8K.
        expected = parse_number(last_match(self._config.pattern, sample.label) or sample.label)
        if expected is None:
            return Grade.error(f"the label is not a number: {sample.label[:80]!r}")
        found = last_match(self._config.pattern, sample.response)
        answer = None if found is None else parse_number(found)
        is_correct = answer is not None and abs(answer - expected) <= self._tolerance
        return verdict(self._config, is_correct=is_correct, answer=None if answer is None else f"{answer:f}")
