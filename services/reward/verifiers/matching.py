"""Answers that are found in the text and compared as text, number or letter; and a form that is asked for."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from flotilla.services.reward.verifiers.base import NO_LABEL, SampleVerifier, verdict
from flotilla.shared.config.sections.reward import ChoiceConfig, ExactConfig, FormatConfig, NumericConfig
from flotilla.shared.schemas.grading import Grade, GradingSample

MAX_EXPONENT = 400
"""Beyond what a float can hold nothing is an answer; without a bound ``1e999999999`` would take all memory."""
GAP = r"[\s*_:(\[$]{0,12}"
"""What may be between the words and the letter: white space, emphasis, a colon, an opening bracket."""


def last_match(pattern: str | re.Pattern[str], text: str) -> str | None:
    """Find the first group of the last match of ``pattern``; None if there is no match or the group took no part."""
    found: str | None = None
    for match in re.compile(pattern).finditer(text):
        found = match.group(1)
    return found


class ExactVerifier(SampleVerifier):
    """Compares text, white space at both ends removed."""

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample: right if the answer is the label."""
        if sample.label is None:
            return Grade.error(NO_LABEL)
        pattern = self._config.pattern
        answer = sample.response if pattern is None else last_match(pattern, sample.response)
        is_correct = answer is not None and self._plain(answer) == self._plain(sample.label)
        return verdict(self._config, is_correct=is_correct, answer=answer)

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()


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


class NumericVerifier(SampleVerifier):
    """Compares the last number that the pattern finds."""

    def __init__(self, config: NumericConfig) -> None:
        self._config = config
        self._tolerance = Decimal(str(config.tolerance))
        self._last: tuple[str, Decimal | None] = "", None

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample: right if the numbers differ by at most the tolerance, wrong if the answer has none."""
        if sample.label is None:
            return Grade.error(NO_LABEL)
        expected = self._expected(sample.label)
        if expected is None:
            return Grade.error(f"the label is not a number: {sample.label[:80]!r}")
        found = last_match(self._config.pattern, sample.response)
        answer = None if found is None else parse_number(found)
        is_correct = answer is not None and abs(answer - expected) <= self._tolerance
        return verdict(self._config, is_correct=is_correct, answer=None if answer is None else f"{answer:f}")

    def _expected(self, label: str) -> Decimal | None:
        # A label may be a whole worked solution that ends in the answer, as in GSM8K; a group's members share it.
        known, expected = self._last
        if known != label:
            expected = parse_number(last_match(self._config.pattern, label) or label)
            self._last = label, expected
        return expected


class ChoiceVerifier(SampleVerifier):
    """Compares the last letter that the response gives as its answer with the label's."""

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config
        letter = rf"([{config.letters}])(?![A-Za-z0-9'])"
        marks = (r"\\boxed\{\s{0,4}(?:\\text\{)?", "<answer>", r"\b(?i:answer|choice|option)\b(?:\s{1,4}(?i:is|are))?")
        self._marked = config.pattern or f"(?:{'|'.join(marks)}){GAP}{letter}"
        self._alone = re.compile(rf"\s*[(\[]?{letter}(?:[)\].:,]|\s*$)")

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample: right if the letters are the same, wrong if the response gives none."""
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


class FormatVerifier(SampleVerifier):
    """Asks for each tag once, with something in it; needs no label."""

    def __init__(self, config: FormatConfig) -> None:
        self._config = config

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample: right if it has the form."""
        first = f"<{self._config.tags[0]}>"
        # Chat templates of models that think may open the first tag in the prompt already.
        is_opened = sample.prompt.rstrip().endswith(first) and not sample.response.lstrip().startswith(first)
        text = first + sample.response if is_opened else sample.response
        is_correct = has_form(text, self._config.tags, allows_outside=self._config.allow_text_outside)
        return verdict(self._config, is_correct=is_correct, answer=None)


def has_form(text: str, tags: Sequence[str], *, allows_outside: bool) -> bool:
    """Return whether ``text`` is ``<a>...</a><b>...</b>`` for the tags a, b: each once, none empty, in this order.

    Args:
        text: what was written.
        tags: names of the tags.
        allows_outside: whether there may be more than white space before, between and after them.
    """
    rest = text
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        before, found, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if not (found and closed and inside.strip()) or (before.strip() and not allows_outside):
            return False
    return allows_outside or not rest.strip()
