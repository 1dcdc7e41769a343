"""verl's scorers as pure functions: what they take for the answer, and when it is right.

They compare text, not mathematics, and what they miss is part of them: ``1,234.`` is not 1234 under the rule of gsm8k.

Source: verl 0.9.1, ``verl/utils/reward_score``; the text rules of MATH are those of Hendrycks et al., Measuring
Mathematical Problem Solving With the MATH Dataset, 2021, those of dapo are of Lewkowycz et al., Solving Quantitative
Reasoning Problems with Language Models, 2022, appendix D, those of search are of Rajpurkar et al., SQuAD, 2016.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TAIL_CHARACTERS = 300
"""Only the end of an answer is searched, by the rules of gsm8k and dapo."""
MANY_TAGS = 10
"""More answer tags than these, opened or closed, leave a quarter of the reward (search)."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a rule says.

    Attributes:
        reward: as verl gives it.
        is_correct: whether the answer is right.
        answer: what was taken for the answer; None if nothing was.
    """

    reward: float
    is_correct: bool
    answer: str | None


def score_gsm8k(response: str, label: str) -> Score:
    """Compare the last ``#### NUMBER`` with the label as text, commas aside; 1 or 0."""
    found = re.findall(r"#### (-?[0-9.,]+)", response[-TAIL_CHARACTERS:])
    answer = found[-1].replace(",", "") if found else None
    return _one_or_zero(answer == label, answer)


def score_math(response: str, label: str) -> Score:
    """Compare the content of the last box with the label, both in a plain spelling; 1 or 0."""
    answer = last_boxed(response)
    return _one_or_zero(answer is not None and is_same_latex(answer, label), answer)


def score_dapo(response: str, label: str) -> Score:
    """Compare the last ``Answer:`` line, or else the last box, with the label, both in a plain spelling; 1 or -1."""
    tail = response[-TAIL_CHARACTERS:]
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    answer = found[-1] if found else _braced(tail, tail.rfind("\\boxed{"), "\\boxed{")
    plain = None if answer is None else plain_quantity(answer)
    is_correct = plain is not None and plain == plain_quantity(label)
    return Score(1.0 if is_correct else -1.0, is_correct, plain)


def score_search(response: str, label: str) -> Score:
    """Compare the last ``<answer>`` with each of the label's targets, case, articles and punctuation aside.

    Raises:
        ValueError: the label is not JSON of the form ``{"target": [...]}``.
    """
    targets = _targets(label)
    answer = last_tagged(response)
    is_correct = answer is not None and plain_words(answer) in {plain_words(target) for target in targets}
    has_many = max(response.count("<answer>"), response.count("</answer>")) > MANY_TAGS
    return Score((0.25 if has_many else 1.0) if is_correct else 0.0, is_correct, answer)


BEFORE_PRIME = ("answer:", "answer is", "answers are")
BEHIND_PRIME = ("is answer", "is the answer", "are answers", "are the answers")
LEADING_TO_PRIME = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def prime_answer(response: str) -> str:
    """Take what "answer is" or the like leads to, of that the last box, of that what its last ``=`` or "is" leads to.

    Source: verl's ``prime_math``, ``match_answer``, from PRIME (Cui et al., Process Reinforcement through Implicit
    Rewards, 2025).
    """
    found = _behind_last_of_each(response, BEFORE_PRIME)
    for marker in BEHIND_PRIME:
        place = found.lower().rfind(marker)
        found = found if place < 0 else found[:place].strip()
    box = max(found.rfind("\\boxed"), found.rfind("\\fbox") if "\\boxed" not in found else -1)
    opening = found.find("{", box) if box >= 0 else -1
    boxed = _braced(found, opening, "{") if opening >= 0 else None
    found = boxed.strip() if boxed and boxed.strip() else found
    if ". " in found:
        found = found.rpartition(". ")[0].strip()
    return _behind_last_of_each(found, LEADING_TO_PRIME)


def _behind_last_of_each(text: str, markers: Iterable[str]) -> str:
    for marker in markers:
        place = text.lower().rfind(marker)
        text = text if place < 0 else text[place + len(marker) :].strip()
    return text


def is_formatted_geometry(response: str) -> bool:
    """Tell whether a thought in ``<think>`` tags opens the answer and a box follows it."""
    end = response.find("</think>", len("<think>"))
    box = response.find("\\boxed{", end)
    return response.startswith("<think>") and 0 < end < box and "}" in response[box:]


def fenced_program(response: str) -> str | None:
    """Take the program: what follows the last ``python`` fence, else the first fenced block; None without a fence."""
    if "```python" in response:
        return response.rpartition("```python")[2].partition("```")[0]
    _, fence, rest = response.partition("```")
    if not fence:
        return None
    program = rest.partition("```")[0]
    first, newline, others = program.partition("\n")
    return others if newline and first.strip().isalpha() else program


def _one_or_zero(is_correct: bool, answer: str | None) -> Score:
    return Score(float(is_correct), is_correct, answer)


# ---- boxes


def last_boxed(text: str) -> str | None:
    """Return the content of the last box.

    ``\\boxed 5`` reaches up to the next dollar sign and goes before any box with braces.
    """
    _, spaced, content = text.rpartition("\\boxed ")
    if spaced:
        return content.partition("$")[0]
    return _braced(text, text.rfind("\\boxed"), "\\boxed{")


def last_braced_box(text: str) -> str | None:
    """Return the content of the last box that has braces; None if there is none or it is never closed."""
    return _braced(text, text.rfind("\\boxed{"), "\\boxed{")


def _braced(text: str, start: int, opening: str) -> str | None:
    if start < 0 or not text.startswith(opening, start):
        return None
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if text[position] == "}" and depth == 0:
            return text[start + len(opening) : position]
    return None


# ---- the plain spelling of MATH


def is_same_latex(given: str, expected: str) -> bool:
    """Compare in the plain spelling; as they are where one of them has none."""
    try:
        return plain_latex(given) == plain_latex(expected)
    except ValueError:
        return given == expected


REMOVED_FROM_LATEX = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def plain_latex(text: str) -> str:
    """Spell a LaTeX expression plainly: without sizes, degrees, units, percent signs and spaces, fractions with braces.

    Raises:
        ValueError: a root or a fraction has nothing after it, or several units follow.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in REMOVED_FROM_LATEX:
        text = text.replace(removed, "")
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("several units")
    text = text.replace("\\\\%", "").replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    text = _with_braced_fractions(_with_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    slashed = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}" if slashed else text


def _with_braced_roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    if "" in rest:
        raise ValueError("a root of nothing")
    return first + "".join("\\sqrt" + (each if each[0] == "{" else f"{{{each[0]}}}{each[1:]}") for each in rest)


def _with_braced_fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    made = first
    for each in rest:
        if not each:
            raise ValueError("a fraction of nothing")
        if each[0] == "{":
            made += "\\frac" + each
        elif len(each) == 1:
            return text
        else:
            below = each[1:] if each[1] == "{" else f"{{{each[1]}}}{each[2:]}"
            made += f"\\frac{{{each[0]}}}{below}"
    return made


# ---- the plain spelling of quantities (dapo)

REPLACED_IN_QUANTITIES = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED_FROM_QUANTITIES = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
UNWRAPPED = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")


def plain_quantity(text: str) -> str:
    """Spell a quantity plainly: what follows the last ``=``, without units, wrappers, dollar signs and commas."""
    text = text.rpartition("=")[2]
    for before, after in REPLACED_IN_QUANTITIES:
        text = text.replace(before, after)
    for removed in REMOVED_FROM_QUANTITIES:
        text = text.replace(removed, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for wrapper in UNWRAPPED:
        text = re.sub(wrapper, r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


# ---- words (search)


def last_tagged(text: str) -> str | None:
    """Return what is between the last pair of answer tags; a pair reaches to the first closing tag."""
    found = None
    for found in _tagged(text):  # noqa: B007  the last one
        pass
    return None if found is None else found.strip()


def _tagged(text: str) -> Iterator[str]:
    end = 0
    while (start := text.find("<answer>", end)) >= 0:
        close = text.find("</answer>", start)
        if close < 0:
            return
        yield text[start + len("<answer>") : close]
        end = close + len("</answer>")


def plain_words(text: str) -> str:
    """Spell words plainly: lower case, without punctuation, articles and repeated white space."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _targets(label: str) -> list[str]:
    given = json.loads(label)
    target = given.get("target") if isinstance(given, dict) else None
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not targets:
        raise ValueError('it is not of the form {"target": [TEXT, ...]}')
    return [str(each) for each in targets]
