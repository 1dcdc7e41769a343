"""What engines check of generation requests, and make of them."""

import math
from collections.abc import Sequence

import numpy as np

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, PromptImage
from flotilla.shared.errors import InvalidRequest, PromptTooLong, Scalar
from flotilla.shared.schemas.trajectory import FinishReason


def check_request(request: GenerationRequest, context_tokens: int, vocab_size: int) -> None:
    """Check that a request can be sampled.

    Raises:
        InvalidRequest: with one entry per offending field.
        PromptTooLong: the prompt and the completion do not fit the context.
    """
    sampling, prompt = request.sampling, request.prompt_ids
    outside = [token for token in (min(prompt), max(prompt)) if not 0 <= token < vocab_size] if prompt else []
    has_temperature = sampling.greedy or (sampling.temperature > 0 and math.isfinite(sampling.temperature))
    checks: list[tuple[str, Scalar, bool, str]] = [
        ("prompt_ids", len(prompt), bool(prompt), "at least one token"),
        ("prompt_ids", str(outside), not outside, f"token ids in [0, {vocab_size})"),
        ("seeds", len(request.seeds), bool(request.seeds), "at least one seed"),
        ("seeds", str(request.seeds), all(0 <= seed < 2**63 for seed in request.seeds), "each in [0, 2**63)"),
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, has_temperature, "finite and above 0"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty <= 2, "above 0, at most 2"),
        ("presence_penalty", sampling.presence_penalty, -2 <= sampling.presence_penalty <= 2, "from -2 to 2"),
        ("frequency_penalty", sampling.frequency_penalty, -2 <= sampling.frequency_penalty <= 2, "from -2 to 2"),
        ("stop", str(sampling.stop), all(sampling.stop), "no empty string"),
    ]
    checks += _prefix_checks(request, vocab_size)
    errors = [
        {"field": name, "value": value, "allowed": allowed} for name, value, is_ok, allowed in checks if not is_ok
    ]
    if errors:
        first = errors[0]
        raise InvalidRequest(f"{first['field']} {first['value']!r} is not allowed: {first['allowed']}", errors=errors)
    needed = len(prompt) + sampling.max_new_tokens
    if needed > context_tokens:
        raise PromptTooLong(
            f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones (max_new_tokens of "
            f"rollout.sampling or evaluation) make {needed}, the engine's context holds {context_tokens}: the smaller "
            "of rollout.engine.context_tokens and what the model itself can hold",
            errors=[
                {
                    "field": "max_new_tokens",
                    "value": sampling.max_new_tokens,
                    "allowed": f"{context_tokens} with the prompt",
                }
            ],
        )


def _prefix_checks(request: GenerationRequest, vocab_size: int) -> list[tuple[str, Scalar, bool, str]]:
    prefixes = [prefix for prefix in request.prefixes if prefix is not None]
    most = request.sampling.max_new_tokens - 1
    lengths = [len(prefix.token_ids) for prefix in prefixes]
    are_whole = all(
        len(prefix.log_probs) == len(prefix.token_ids) and prefix.versions and prefix.versions[0][0] == 0
        for prefix in prefixes
    )
    are_known = all(0 <= token < vocab_size for prefix in prefixes for token in prefix.token_ids)
    num = len(request.prefixes)
    are_routed = all(
        each.experts is None or each.experts.num_tokens == len(request.prompt_ids) + len(each.token_ids) - 1
        for each in prefixes
    )
    return [
        ("prefixes", num, num in {0, len(request.seeds)}, "none, or one for each seed"),
        ("prefixes", str(lengths), all(1 <= each <= most for each in lengths), f"1 to {most} tokens each"),
        ("prefixes", str(lengths), are_whole, "a log-probability for each token, and versions from the first on"),
        ("prefixes", str(lengths), are_known, f"token ids in [0, {vocab_size})"),
        ("prefixes", str(lengths), are_routed, "experts of all tokens but the last, the prompt's included, or none"),
    ]


def unstarted_completion(request: GenerationRequest, index: int) -> Completion:
    """Make the completion of a sample that was aborted before it joined the batch: what it came with."""
    prefix = request.prefixes[index] if request.prefixes else None
    if prefix is None:
        return Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.ABORTED)
    return Completion(
        token_ids=np.array(prefix.token_ids, np.int32),
        log_probs=np.array(prefix.log_probs, np.float32),
        versions=prefix.versions,
        finish_reason=FinishReason.ABORTED,
        num_resumed=len(prefix.token_ids),
        experts=prefix.experts,
    )


def condensed(token_ids: Sequence[int], images: Sequence[PromptImage]) -> tuple[int, ...]:
    """Leave one token of each image: what people read, and what engines' servers expand again."""
    found: list[int] = []
    at = 0
    for image in images:
        found += token_ids[at : image.start + 1]
        at = image.start + image.num_tokens
    return (*found, *token_ids[at:])
