"""The training-health checks, in the order in which causes come before their consequences.

Those of what is sampled are here: completions that never end, are empty, or follow a prompt that is not the model's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flotilla.services.gateway.monitoring.health import (
    drift,
    gaps,
    memory,
    rewards,
    sources,
    updates,
)
from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen
from flotilla.shared.config.sections.health import CheckName

MIN_PROMPTS = 16
ALL = 0.9


def always_truncated(evidence: Evidence) -> Seen | None:
    """See completions that end at the length limit."""
    graded = evidence.graded
    share = evidence.facts.thresholds.truncated_share
    if not _is_enough(evidence) or graded.truncated < share * graded.samples:
        return None
    return Seen(
        f"{graded.truncated} of the last {graded.samples} completions reached the limit of "
        f"{evidence.facts.max_new_tokens} tokens and were cut off",
        {"samples": float(graded.samples), "truncated": float(graded.truncated)},
    )


def empty_completions(evidence: Evidence) -> Seen | None:
    """See completions without any text."""
    graded = evidence.graded
    share = evidence.facts.thresholds.truncated_share
    if not _is_enough(evidence) or graded.empty < share * graded.samples:
        return None
    return Seen(
        f"{graded.empty} of the last {graded.samples} completions have no text",
        {"samples": float(graded.samples), "empty": float(graded.empty)},
    )


def _is_enough(evidence: Evidence) -> bool:
    """Whether rollouts, too, have reported: a template that does not fit would be the cause."""
    return evidence.is_enough_graded and evidence.sampled.prompts >= MIN_PROMPTS


def template_mismatch(evidence: Evidence) -> Seen | None:
    """See prompts, or completions, whose special tokens are not what the model's tokenizer expects."""
    sampled, token = evidence.sampled, evidence.special_token
    if sampled.prompts < MIN_PROMPTS:
        return None
    named = f" ({token})" if token else ""
    if sampled.doubled_special >= ALL * sampled.prompts:
        return Seen(
            f"{sampled.doubled_special} of the last {sampled.prompts} prompts have a special token{named} twice in a "
            "row",
            {"prompts": float(sampled.prompts), "doubled_special": float(sampled.doubled_special)},
            "remove the token from data.input_template or the model's chat template: one of them adds it already",
        )
    if sampled.without_start >= ALL * sampled.prompts:
        return Seen(
            f"{sampled.without_start} of the last {sampled.prompts} prompts lack the special tokens that the model's "
            "tokenizer begins every text with",
            {"prompts": float(sampled.prompts), "without_start": float(sampled.without_start)},
            "begin data.input_template or the chat template with the tokenizer's first token",
        )
    if sampled.completions and sampled.past_special >= ALL * sampled.completions:
        return Seen(
            f"{sampled.past_special} of the last {sampled.completions} completions go on after a special token{named} "
            "that does not end them",
            {"completions": float(sampled.completions), "past_special": float(sampled.past_special)},
            "if the token ends a turn, name it as eos_token_id in the model's generation_config.json, or its text in "
            "rollout.sampling.stop",
        )
    return None


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: as in docs/health.md.
        component: reward, rollout or trainer.
        look: what it sees in the evidence, or None.
        advice: what to do about it.
        explains: checks whose findings are consequences of this one, and are not shown beside it.
    """

    name: CheckName
    component: str
    look: Callable[[Evidence], Seen | None]
    advice: str
    explains: frozenset[CheckName] = frozenset()


@dataclass(frozen=True, slots=True)
class Found:
    """A check and what it saw."""

    check: Check
    seen: Seen


_ALIKE = frozenset({CheckName.CONSTANT_REWARD, CheckName.NO_SIGNAL})
_OF_ANSWERS = _ALIKE | {CheckName.NO_ANSWER_FOUND, CheckName.NEVER_RIGHT, CheckName.ENTROPY_GONE}
_OF_COMPLETIONS = _OF_ANSWERS | {CheckName.ALWAYS_TRUNCATED, CheckName.EMPTY_COMPLETIONS, CheckName.COLLAPSED}

CHECKS: tuple[Check, ...] = (
    Check(
        CheckName.NOT_FINITE,
        "trainer",
        updates.not_finite,
        "lower optimisation.learning_rate, bound the rewards (reward.shaping.clip), or use a wider model.dtype; three "
        "such steps in a row end the experiment",
        _OF_COMPLETIONS
        | {CheckName.DIVERGING, CheckName.KL_EXPLODING, CheckName.ENGINE_MISMATCH, CheckName.ENGINE_GAP_GROWS},
    ),
    Check(
        CheckName.DIVERGING,
        "trainer",
        updates.diverging,
        "lower optimisation.learning_rate, add optimisation.warmup_updates, or bound the rewards",
        _OF_COMPLETIONS | {CheckName.KL_EXPLODING},
    ),
    Check(
        CheckName.KL_EXPLODING,
        "trainer",
        updates.kl_exploding,
        "raise algorithm.kl.coefficient, or lower optimisation.learning_rate",
        _OF_COMPLETIONS,
    ),
    Check(
        CheckName.ENGINE_MISMATCH,
        "trainer",
        updates.engine_mismatch,
        "engine and trainer compute different models: compare their dtypes and the model's config; until then set "
        "algorithm.old_log_probs to recompute with a correction",
        frozenset({CheckName.DIVERGING, CheckName.ENGINE_GAP_GROWS}),
    ),
    Check(
        CheckName.ENGINE_GAP_GROWS,
        "trainer",
        updates.engine_gap_grows,
        "see in `served` of the rollouts (`GET /v1/services`) whether each has proved its version, and with `flotilla "
        "replay RUN STEP` whether the trainer computes what it recorded; an engine that drifts is begun anew by "
        "`flotilla drain SERVICE`",
    ),
    Check(
        CheckName.ROLLOUT_DIFFERS,
        "rollout",
        gaps.rollout_differs,
        "begin that engine anew by `flotilla drain SERVICE`; see in `served` of `GET /v1/services` whether it has "
        "proved its version, and compare its host, device and software with those of the others",
        frozenset({CheckName.ENGINE_MISMATCH, CheckName.ENGINE_GAP_GROWS}),
    ),
    Check(
        CheckName.COLLAPSED,
        "trainer",
        updates.collapsed,
        "lower optimisation.learning_rate, and go back to a checkpoint from before",
        _OF_COMPLETIONS - {CheckName.COLLAPSED},
    ),
    Check(
        CheckName.TEMPLATE_MISMATCH,
        "rollout",
        template_mismatch,
        "make data.input_template, or the chat template, what the model was trained with",
        _OF_COMPLETIONS,
    ),
    Check(
        CheckName.WRONG_LABELS,
        "reward",
        rewards.wrong_labels,
        "set data.label_column to the column with the expected answers",
        _OF_ANSWERS | {CheckName.GRADER_FAILING, CheckName.GRADES_MISSING},
    ),
    Check(
        CheckName.GRADER_FAILING,
        "reward",
        rewards.grader_failing,
        "mend the grader by its own words; samples without a grade are not trained on, and "
        "reward.max_consecutive_failures such groups in a row end the experiment",
        _OF_ANSWERS | {CheckName.GRADES_MISSING},
    ),
    Check(
        CheckName.GRADES_MISSING,
        "reward",
        rewards.grades_missing,
        "find what these rows have in common: samples without a grade are not trained on, and held-out accuracies "
        "leave them out; where graders abstain from them on purpose, put grades_missing into health.skip",
    ),
    Check(
        CheckName.GRADERS_DISAGREE,
        "reward",
        rewards.graders_disagree,
        "look at the samples: where the second grade is right, mend reward.components and go on from before by "
        "`flotilla regrade` and the fork that it names; where it is wrong, mend reward.audit. A resume changes nothing",
    ),
    Check(
        CheckName.AUDIT_MISSING,
        "reward",
        rewards.audit_missing,
        "mend the graders of reward.audit by their words, or raise reward.audit.deadline_seconds: until then nothing "
        "tells whether the reward is gamed",
    ),
    Check(
        CheckName.COMPONENTS_DRIFT,
        "reward",
        drift.components_drift,
        "look at the newest samples: where the rising component is gamed, mend it or lower its weight, see by "
        "`flotilla regrade RUN --reward FILE` what that changes, and go on by the `flotilla fork` that it names",
    ),
    Check(
        CheckName.NEAR_DUPLICATES,
        "reward",
        drift.near_duplicates,
        "compare the two answers: where the reward asks for that text, mend it (`flotilla regrade RUN --reward FILE`); "
        "else sample more broadly: `flotilla set EXPERIMENT rollout.sampling.temperature=1.2`, or a larger "
        "algorithm.entropy_coefficient",
    ),
    Check(
        CheckName.EMPTY_COMPLETIONS,
        "rollout",
        empty_completions,
        "look at the prompts: a template that ends the assistant's turn, or an end-of-text token in "
        "rollout.sampling.stop, leaves nothing to say",
        _OF_ANSWERS,
    ),
    Check(
        CheckName.ALWAYS_TRUNCATED,
        "rollout",
        always_truncated,
        "raise rollout.sampling.max_new_tokens; if the answers are complete long before, the model does not end its "
        "turn: check the chat template and eos_token_id",
        _OF_ANSWERS,
    ),
    Check(
        CheckName.NO_ANSWER_FOUND,
        "reward",
        rewards.no_answer_found,
        "compare the completions with the grader's pattern in reward.components, and tell the model in the prompt how "
        "to give its answer",
        _ALIKE | {CheckName.ENTROPY_GONE},
    ),
    Check(
        CheckName.NEVER_RIGHT,
        "reward",
        rewards.never_right,
        "compare answers with labels: data.label_column may be another column, or the problems are too hard for the "
        "model",
        _ALIKE | {CheckName.ENTROPY_GONE},
    ),
    Check(
        CheckName.NOTHING_LEFT,
        "reward",
        rewards.nothing_left,
        "the problems are solved: use harder ones, or stop",
        _ALIKE | {CheckName.ENTROPY_GONE},
    ),
    Check(
        CheckName.ENTROPY_GONE,
        "trainer",
        updates.entropy_gone,
        "raise algorithm.entropy_coefficient or rollout.sampling.temperature, lower optimisation.learning_rate, or go "
        "back to an earlier checkpoint",
        _ALIKE,
    ),
    Check(
        CheckName.CONSTANT_REWARD,
        "reward",
        rewards.constant_reward,
        "look at the samples: the grader does not tell them apart",
        frozenset({CheckName.NO_SIGNAL}),
    ),
    Check(
        CheckName.MEMORY_CREEPS,
        "fleet",
        memory.memory_creeps,
        "a process that keeps what it no longer needs runs out of memory in the end: `flotilla drain SERVICE` begins a "
        "rollout, reward or sandbox service anew, and a pause and resume the trainer; where its growth is wanted, such "
        "as of code of yours that caches, raise health.memory_slope",
    ),
    Check(
        CheckName.DEAD_SOURCE,
        "reward",
        sources.dead_source,
        "these rows cost sampling and teach nothing: where their rewards are the best, they are solved; else they are "
        "too hard, or the grader or label is wrong for them. Give the source the weight 0, or mend it",
    ),
    Check(
        CheckName.NO_SIGNAL,
        "reward",
        rewards.no_signal,
        "use problems that the model solves sometimes, a larger rollout.group_size, or a reward with more than two "
        "values; health.max_groups_without_signal bounds the wait",
    ),
)


def find(evidence: Evidence, *, without: Iterable[CheckName] = ()) -> list[Found]:
    """Make all checks; a finding that another one explains is left out.

    Args:
        without: checks that are off; they explain nothing either.
    """
    off = frozenset(without)
    found = [
        Found(check, seen) for check in CHECKS if check.name not in off and (seen := check.look(evidence)) is not None
    ]
    explained = frozenset().union(*(each.check.explains for each in found))
    return [each for each in found if each.check.name not in explained]
