"""Checks of what is sampled: completions that never end, are empty, or follow a prompt that is not the model's."""

from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen

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
