"""Makes completions of what servers reply; pure functions."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.rollout.engines.base import Completion, GenerationRequest
from services.rollout.engines.requests import unstarted_completion
from services.rollout.engines.resumption import Prefix
from shared.schemas.trajectory import FinishReason


def new_request_id() -> str:
    """Make an id of a completion: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def make_completion(
    request: GenerationRequest,
    index: int,
    prefix: Prefix | None,
    *,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    spans: Sequence[Mapping[str, Any]],
    reason: FinishReason,
) -> Completion:
    """Check what a server sampled and put it behind what was kept.

    Args:
        request: what was asked of the engine.
        index: of the completion in it.
        prefix: what was kept of the one that came with it.
        token_ids: that the server sampled.
        log_probs: nats, of each of them.
        spans: half-open ranges over all of them, with ``version``, ``start`` and ``end``.
        reason: why it ended.

    Raises:
        ValueError: a log-probability is not finite, or the spans do not cover the tokens one after the other.
    """
    runs = _runs(spans, len(token_ids))
    if not np.isfinite(log_probs).all():
        raise ValueError("a log-probability is not finite")
    sampling = request.sampling
    if sampling.ignore_eos and (end := _first_stop(token_ids, sampling.stop_token_ids)) is not None:
        token_ids, log_probs, reason = token_ids[:end], log_probs[:end], FinishReason.STOP
        runs = tuple(run for run in runs if run[0] < end)
    return _joined(token_ids, log_probs, runs, reason, prefix) or unstarted_completion(request, index)


def _first_stop(token_ids: Sequence[int], stops: Sequence[int]) -> int | None:
    """Return how many tokens there are up to the first one that ends the completion."""
    return next((place + 1 for place, token in enumerate(token_ids) if token in stops), None)


def _runs(spans: Sequence[Mapping[str, Any]], num: int) -> tuple[tuple[int, int], ...]:
    """Make run-length versions of half-open spans over all tokens."""
    runs: list[tuple[int, int]] = []
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise ValueError(f"version spans do not follow each other: {spans}")
        if span["end"] > end:
            runs.append((end, int(span["version"])))
        end = span["end"]
    if end != num:
        raise ValueError(f"version spans cover {end} of {num} tokens")
    return tuple(runs)


def _joined(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    runs: Sequence[tuple[int, int]],
    reason: FinishReason,
    prefix: Prefix | None,
) -> Completion | None:
    """Put what was sampled behind what was kept; None if there is neither."""
    num = len(prefix.token_ids) if prefix is not None else 0
    if not num and not token_ids:
        return None
    merged = list(prefix.versions) if prefix is not None else []
    merged += [(start + num, version) for start, version in runs]
    merged = [run for place, run in enumerate(merged) if place == 0 or run[1] != merged[place - 1][1]]
    return Completion(
        token_ids=np.array([*(prefix.token_ids if prefix else ()), *token_ids], np.int32),
        log_probs=np.array([*(prefix.log_probs if prefix else ()), *log_probs], np.float32),
        versions=tuple(merged),
        finish_reason=reason,
        num_resumed=num,
    )
