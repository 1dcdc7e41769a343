"""Which of verl's scorers grades the rows of a data source.

Source: verl 0.9.1, ``verl/utils/reward_score/__init__.py`` (the names and what they choose).
"""

from collections.abc import Iterable
from enum import StrEnum


class VerlScorer(StrEnum):
    """A rule of verl's, named after the data that it was made for."""

    GSM8K = "gsm8k"
    MATH = "math"
    DAPO = "dapo"
    GEOMETRY = "geometry"
    PRIME = "prime"
    SEARCH = "search"
    CODE = "code"


AIME = "aime"
"""Every data source that begins so is graded as math_dapo is."""

BY_SOURCE = {
    "openai/gsm8k": VerlScorer.GSM8K,
    "lighteval/MATH": VerlScorer.MATH,
    "DigitalLearningGmbH/MATH-lighteval": VerlScorer.MATH,
    "HuggingFaceH4/MATH-500": VerlScorer.MATH,
    "math_dapo": VerlScorer.DAPO,
    "math": VerlScorer.DAPO,
    "math_dapo_reasoning": VerlScorer.DAPO,
    "hiyouga/geometry3k": VerlScorer.GEOMETRY,
    "numina_aops_forum": VerlScorer.PRIME,
    "numina_synthetic_math": VerlScorer.PRIME,
    "numina_amc_aime": VerlScorer.PRIME,
    "numina_synthetic_amc": VerlScorer.PRIME,
    "numina_cn_k12": VerlScorer.PRIME,
    "numina_olympiads": VerlScorer.PRIME,
    "searchR1_nq": VerlScorer.SEARCH,
    "searchR1_triviaqa": VerlScorer.SEARCH,
    "searchR1_popqa": VerlScorer.SEARCH,
    "searchR1_hotpotqa": VerlScorer.SEARCH,
    "searchR1_2wikimultihopqa": VerlScorer.SEARCH,
    "searchR1_musique": VerlScorer.SEARCH,
    "searchR1_bamboogle": VerlScorer.SEARCH,
    "codecontests": VerlScorer.CODE,
    "apps": VerlScorer.CODE,
    "codeforces": VerlScorer.CODE,
    "taco": VerlScorer.CODE,
}


def scorer_of(data_source: str) -> VerlScorer | None:
    """Find the scorer of a data source; None if it has none here."""
    return VerlScorer.DAPO if data_source.startswith(AIME) else BY_SOURCE.get(data_source)


def why_not_graded(data_source: str | None, *, runs_code: bool) -> str | None:
    """Return why the rows of a data source cannot be graded, and what to do; None if they can."""
    if data_source is None:
        return "the row has no data source to choose one of verl's scorers by"
    scorer = scorer_of(data_source)
    if scorer is None:
        known = ", ".join((*BY_SOURCE, f"{AIME}*"))
        return (
            f"none of verl's scorers is for the data source {data_source!r}; known: {known}; grade others by a "
            "component of another kind, with data_sources in both"
        )
    if scorer is VerlScorer.CODE and not runs_code:
        return f"rows of {data_source!r} are programs: set runs_code of the component, which asks for a sandbox"
    return None


def first_not_graded(data_sources: Iterable[str | None], *, runs_code: bool) -> str | None:
    """Return the first reason why one of the data sources cannot be graded; None if all can."""
    given = dict.fromkeys(data_sources)
    reasons = (why_not_graded(each, runs_code=runs_code) for each in given)
    return next((reason for reason in reasons if reason is not None), None)
