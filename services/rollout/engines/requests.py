"""Checks of generation requests that every embedded engine makes."""

import math

import numpy as np

from services.rollout.engines.base import Completion, GenerationRequest
from shared.errors import InvalidRequest, Scalar
from shared.schemas.trajectory import FinishReason


def check_request(request: GenerationRequest, context_tokens: int, vocab_size: int) -> None:
    """Check that a request can be sampled.

    Raises:
        InvalidRequest: with one entry per offending field.
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
        ("stop", str(sampling.stop), all(sampling.stop), "no empty string"),
    ]
    errors = [
        {"field": name, "value": value, "allowed": allowed} for name, value, is_ok, allowed in checks if not is_ok
    ]
    if errors:
        first = errors[0]
        raise InvalidRequest(f"{first['field']} {first['value']!r} is not allowed: {first['allowed']}", errors=errors)
    needed = len(prompt) + sampling.max_new_tokens
    if needed > context_tokens:
        raise InvalidRequest(
            f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones make {needed}, "
            f"the engine's context holds {context_tokens}",
            errors=[
                {
                    "field": "max_new_tokens",
                    "value": sampling.max_new_tokens,
                    "allowed": f"{context_tokens} with the prompt",
                }
            ],
        )


def empty_completion() -> Completion:
    """Make the completion of a sample that was aborted before its first token."""
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.ABORTED)
