"""verl's own scorers, chosen by the data source of each row.

Text rules are computed here. Where the texts of geometry and of prime differ, math-verify compares them in its process
(verl: mathruler, and PRM800K's and Minerva's rules over sympy); programs are run by the sandbox. Where verl gives 0
because something failed (a label that cannot be read, a sandbox that does not answer), the sample is an error.
"""

import asyncio
from collections.abc import Callable, Sequence

from flotilla.services.reward.verifiers.base import LONGEST_ANSWER, NO_LABEL, AsksServer, Verifier
from flotilla.services.reward.verifiers.verl_rules import (
    Score,
    fenced_program,
    is_formatted_geometry,
    is_same_latex,
    last_braced_box,
    prime_answer,
    score_dapo,
    score_gsm8k,
    score_math,
    score_search,
)
from flotilla.shared.config.sections.reward import VerlDefaultConfig
from flotilla.shared.config.sections.verl_sources import VerlScorer, scorer_of, why_not_graded
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.service import Failure

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
