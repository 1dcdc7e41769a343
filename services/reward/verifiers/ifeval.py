"""Whether a response follows the instruction that its label describes, minus a penalty for repeating itself.

Instructions that a program can check, such as "at least three paragraphs": one function for each, over the response.

Source: Zhou et al., Instruction-Following Evaluation for Large Language Models, 2023; names and arguments are those of
the data of Tulu 3 (Lambert et al., 2024), which ROLL's worker reads.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from flotilla.services.reward.verifiers.base import NO_LABEL, SampleVerifier
from flotilla.shared.config.sections.reward import IfevalConfig
from flotilla.shared.schemas.grading import Grade, GradingSample

BULLET: Final = re.compile(r"^[ \t]*[*-]", re.MULTILINE)
HIGHLIGHT: Final = re.compile(r"\*[^\n*]+\*")
PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]+\]")
TITLE: Final = re.compile(r"<<([^<>\n]+)>>")
SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")
DIVIDER: Final = re.compile(r"\* ?\* ?\*")


def _compared(found: int, wanted: int, how: str) -> bool:
    match how:
        case "at least":
            return found >= wanted
        case "at most":
            return found <= wanted
        case "less than":
            return found < wanted
        case "around":
            return abs(found - wanted) <= max(round(wanted * 0.1), 1)
    raise ValueError(f"{how!r} is no way to compare")


def verify_keywords(text: str, keyword_list: list[str]) -> bool:
    """Every keyword is there, in any case."""
    return all(word.lower() in text.lower() for word in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:  # noqa: N803  the data's name
    """The word is there exactly so often."""
    return len(re.findall(rf"\b{re.escape(word.lower())}\b", text.lower())) == N


def validate_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """None of the words is there."""
    return not any(re.search(rf"\b{re.escape(word.lower())}\b", text.lower()) for word in forbidden_words)


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:  # noqa: N803  the data's name
    """The letter is there exactly so often, case minded."""
    if len(letter) != 1:
        raise ValueError("letter must be one character")
    return text.count(letter) == N


def verify_paragraph_count(text: str, N: int) -> bool:  # noqa: N803  the data's name
    """There are so many paragraphs, with ``* * *`` between them."""
    parts = DIVIDER.split(text)
    return len(parts) == N and all(part.strip() for part in parts)


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:  # noqa: N803  the data's name
    """There are so many words."""
    return _compared(len(text.split()), N, quantifier)


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:  # noqa: N803  the data's name
    """There are so many sentences."""
    return _compared(sum(bool(each.strip()) for each in SENTENCE.split(text)), N, quantifier)


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:  # noqa: N803  the data's name
    """There are so many paragraphs, with an empty line between them, and number i begins with the word."""
    parts = [part.strip() for part in text.split("\n\n")]
    return len(parts) == N and 1 <= i <= N and parts[i - 1].lower().startswith(first_word.lower())


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """There is a postscript behind the marker."""
    before, marker, after = text.partition(postscript_marker)
    return bool(marker and before.strip() and after.strip())


def validate_placeholders(text: str, N: int) -> bool:  # noqa: N803  the data's name
    """There are at least so many placeholders, such as ``[name]``."""
    return len(PLACEHOLDER.findall(text)) >= N


def verify_bullet_points(text: str, N: int) -> bool:  # noqa: N803  the data's name
    """There are exactly so many bullets."""
    return len(BULLET.findall(text)) == N


def validate_title(text: str) -> bool:
    """There is a title, as ``<<title>>``."""
    return any(each.strip() for each in TITLE.findall(text))


def validate_choice(text: str, options: list[str]) -> bool:
    """The response names one of the options, as whole words."""
    return any(re.search(rf"(?<!\w){re.escape(each.lower())}(?!\w)", text.lower()) for each in options)


def validate_highlighted_sections(text: str, N: int) -> bool:  # noqa: N803  the data's name
    """There are at least so many parts in asterisks."""
    return len([each for each in HIGHLIGHT.findall(text) if each.strip("*").strip()]) >= N


def validate_sections(text: str, N: int, section_splitter: str) -> bool:  # noqa: N803  the data's name
    """There are so many sections, each beginning with the splitter and its number."""
    return len(re.split(rf"\s?{re.escape(section_splitter)}\s?\d+\s?", text)) - 1 == N


def validate_json_format(text: str) -> bool:
    """The whole response is JSON, perhaps between triple backticks."""
    plain = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        plain = plain.removeprefix(fence)
    try:
        json.loads(plain.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """The response begins with the request, word by word."""
    return text.strip().lower().startswith(original_prompt.strip().lower())


def validate_two_responses(text: str) -> bool:
    """There are two different responses, with six asterisks between them."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def validate_uppercase(text: str) -> bool:
    """There is no small letter."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """There is no capital letter."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:  # noqa: N803  the data's name
    """There are so many words of capitals alone."""
    return _compared(len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier)


def validate_end(text: str, end_phrase: str) -> bool:
    """The response ends with the phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def validate_quotation(text: str) -> bool:
    """The whole response is in double quotation marks."""
    plain = text.strip()
    return len(plain) > 1 and plain.startswith('"') and plain.endswith('"')


def validate_no_commas(text: str) -> bool:
    """There is no comma."""
    return "," not in text


CHECKS: Final[Mapping[str, Callable[..., bool]]] = {
    check.__name__: check
    for check in (
        verify_keywords, verify_keyword_frequency, validate_forbidden_words, verify_letter_frequency,
        verify_paragraph_count, validate_word_constraint, verify_sentence_constraint, validate_paragraphs,
        verify_postscript, validate_placeholders, verify_bullet_points, validate_title, validate_choice,
        validate_highlighted_sections, validate_sections, validate_json_format, validate_repeat_prompt,
        validate_two_responses, validate_uppercase, validate_lowercase, validate_frequency_capital_words, validate_end,
        validate_quotation, validate_no_commas,
    )
}  # fmt: skip
"""By the name in a label's ``func_name``. Not here: the language of a response, which takes a model to tell."""


def follows(text: str, label: str) -> bool:
    """Return whether a response follows the instruction of its label.

    Args:
        label: JSON such as ``{"func_name": "verify_bullet_points", "N": 3}``; arguments that are null are left out.

    Raises:
        ValueError: the label cannot be read, or names a check that is not here.
    """
    try:
        asked: Any = json.loads(label)
        name, arguments = asked["func_name"], {key: each for key, each in asked.items() if key != "func_name"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError('the label is no instruction: {"func_name": ..., arguments}') from error
    check = CHECKS.get(name)
    if check is None:
        raise ValueError(f"the label's instruction {name!r} is not checked here; known: {', '.join(CHECKS)}")
    try:
        return check(
            text, **{key: each for key, each in arguments.items() if each is not None and key in _names(check)}
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the label's instruction {name!r} has other arguments: {error}") from error


def _names(check: Callable[..., bool]) -> tuple[str, ...]:
    code = check.__code__
    return code.co_varnames[1 : code.co_argcount]


def repetition_penalty(text: str, *, ngram: int = 3, largest: float = 0.5) -> float:
    """Compute 0 for a text without a repeated n-gram of words, down to ``-largest`` for nothing but repetition."""
    words = text.lower().split()
    grams = Counter(tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1))
    total = sum(grams.values())
    return -largest * (1 - len(grams) / total) if total else 0.0


class IfevalVerifier(SampleVerifier):
    """Checks instructions."""

    def __init__(self, config: IfevalConfig) -> None:
        self._config = config

    def grade(self, sample: GradingSample) -> Grade:
        """Grade one sample; a label that cannot be read is an error."""
        if sample.label is None:
            return Grade.error(NO_LABEL)
        try:
            is_right = follows(sample.response, sample.label)
        except ValueError as error:
            return Grade.error(str(error))
        penalty = repetition_penalty(sample.response, largest=self._config.repetition_penalty)
        verdict = self._config.correct if is_right else self._config.incorrect
        return Grade.scored(verdict + penalty, metrics={"followed": float(is_right), "repetition": penalty})
