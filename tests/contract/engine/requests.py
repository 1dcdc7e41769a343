"""Builders of generation requests."""

import itertools
from collections.abc import Sequence
from typing import Any

from flotilla.services.rollout.engines.base import UNMIXED, GenerationRequest, Prefix, ResumeRule, SamplingParameters

_numbers = itertools.count()


def a_request(
    prompt_ids: Sequence[int] = (5, 6, 7),
    seeds: Sequence[int] = (1,),
    *,
    request_id: str | None = None,
    holds_weights: bool = False,
    is_turn: bool = False,
    prefixes: Sequence[Prefix | None] = (),
    resume: ResumeRule = UNMIXED,
    adapter: str | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """Make a request that samples 8 tokens, whatever they are."""
    return GenerationRequest(
        request_id=request_id or f"request-{next(_numbers)}",
        prompt_ids=tuple(prompt_ids),
        seeds=tuple(seeds),
        sampling=SamplingParameters(**{"max_new_tokens": 8, "ignore_eos": True, **sampling}),
        holds_weights=holds_weights,
        is_turn=is_turn,
        prefixes=tuple(prefixes),
        resume=resume,
        adapter=adapter,
    )
