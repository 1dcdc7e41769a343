"""verl's own scorers, chosen by the data source of each row.

Text rules are pure functions: what they take for the answer, and when it is right. They compare text, not mathematics,
and what they miss is part of them: ``1,234.`` is not 1234 under the rule of gsm8k. Where the texts of geometry and of
prime differ, math-verify compares them in its process (verl: mathruler, and PRM800K's and Minerva's rules over sympy);
programs are run by the sandbox. Where verl gives 0 because something failed (a label that cannot be read, a sandbox
that does not answer), the sample is an error.

Source: verl 0.9.1, ``verl/utils/reward_score``; the text rules of MATH are those of Hendrycks et al., Measuring
Mathematical Problem Solving With the MATH Dataset, 2021, those of dapo are of Lewkowycz et al., Solving Quantitative
Reasoning Problems with Language Models, 2022, appendix D, those of search are of Rajpurkar et al., SQuAD, 2016.
"""

import asyncio
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flotilla.services.reward.verifiers.base import LONGEST_ANSWER, NO_LABEL, AsksServer, Verifier
from flotilla.shared.config.sections.reward import VerlDefaultConfig
from flotilla.shared.config.sections.verl_sources import VerlScorer, scorer_of, why_not_graded
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.service import Failure

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
        answer: the extracted answer; None if none was found.
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
    """Return whether a thought in ``<think>`` tags opens the answer and a box follows it."""
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


RULES: dict[VerlScorer, Callable[[str, str], Score]] = {
    VerlScorer.GSM8K: score_gsm8k,
    VerlScorer.MATH: score_math,
    VerlScorer.DAPO: score_dapo,
    VerlScorer.SEARCH: score_search,
}
FORMAT_SHARE = 0.1
"""What the format counts in the reward of geometry; the accuracy counts the rest."""
CODE_CASES = 10
"""How many cases of a program verl counts."""


class VerlDefaultVerifier:
    """Grades as verl's ``default_compute_score`` does.

    Args:
        config: the component's section.
        math: compares mathematics, 1 if right; closed by this object.
        code: runs programs; None if the component runs no code. Closed by this object.
    """

    def __init__(self, config: VerlDefaultConfig, math: Verifier, code: Verifier | None) -> None:
        self._config = config
        self._math = math
        self._code = code

    @property
    def problem(self) -> Failure | None:
        """The sandbox, where it did not answer when it was last asked."""
        return self._code.problem if isinstance(self._code, AsksServer) else None

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by the rule of its data source; one that is not known makes it an error."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End the processes and close the connections."""
        await self._math.aclose()
        if self._code is not None:
            await self._code.aclose()

    async def _grade(self, sample: GradingSample) -> Grade:
        reason = why_not_graded(sample.data_source, runs_code=self._code is not None)
        if reason is not None or sample.data_source is None:
            return Grade.error(str(reason))
        if sample.label is None:
            return Grade.error(NO_LABEL)
        scorer = scorer_of(sample.data_source)
        if scorer is VerlScorer.CODE and self._code is not None:
            return await _run(self._code, sample)
        if scorer is VerlScorer.GEOMETRY:
            return await self._geometry(sample, sample.label)
        if scorer is VerlScorer.PRIME:
            return await self._prime(sample, sample.label)
        assert scorer is not None
        try:
            return _grade_of(RULES[scorer](sample.response, sample.label))
        except ValueError as error:
            return Grade.error(f"the label cannot be read by the scorer {scorer.value}: {error}"[:500])

    async def _geometry(self, sample: GradingSample, label: str) -> Grade:
        answer = last_braced_box(sample.response)
        compared = await self._compared(sample, answer, label)
        if compared.reward is None:
            return compared
        is_correct = compared.reward == 1.0
        format_reward = float(is_formatted_geometry(sample.response))
        reward = (1.0 - FORMAT_SHARE) * is_correct + FORMAT_SHARE * format_reward
        return _grade_of(Score(reward, is_correct, answer))

    async def _prime(self, sample: GradingSample, label: str) -> Grade:
        answer = prime_answer(sample.response)
        compared = await self._compared(sample, answer, label)
        if compared.reward is None:
            return compared
        return _grade_of(Score(compared.reward, compared.reward == 1.0, answer))

    async def _compared(self, sample: GradingSample, answer: str | None, label: str) -> Grade:
        """Compare an answer with the label, as text and then as mathematics: 1 or 0."""
        if answer is None:
            return Grade.scored(0.0)
        if is_same_latex(answer, label):
            return Grade.scored(1.0)
        (compared,) = await self._math.score([sample.model_copy(update={"response": f"\\boxed{{{answer}}}"})])
        return compared


async def _run(code: Verifier, sample: GradingSample) -> Grade:
    """Run the program that verl would take out of the answer."""
    program = fenced_program(sample.response)
    response = "" if program is None else f"```python\n{program.rstrip()}\n```\n"
    (grade,) = await code.score([sample.model_copy(update={"response": response})])
    return grade


def _grade_of(score: Score) -> Grade:
    answer = None if score.answer is None else score.answer.strip()[:LONGEST_ANSWER]
    return Grade.scored(score.reward, metrics={"acc": float(score.is_correct)}, answer=answer)
