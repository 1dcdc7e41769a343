"""Makes completions of what servers reply; pure functions."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix
from flotilla.services.rollout.engines.requests import unstarted_completion
from flotilla.services.rollout.engines.servers.routed_experts import ServedRouters, record_of
from flotilla.shared.schemas.trajectory import FinishReason


def new_request_id() -> str:
    """Make an id of a completion: 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A server's report of one completion.

    Attributes:
        token_ids: that it sampled.
        scores: token and log-probability (nats) of each of them.
        spans: half-open ranges over all of them, with ``version``, ``start`` and ``end``.
        reason: why it ended.
        experts: that routers chose for each token but the last, the prompt's included, and each layer, one after the
            other; None where it does not say.
    """

    token_ids: Sequence[int]
    scores: Sequence[tuple[int, float]]
    spans: Sequence[Mapping[str, Any]]
    reason: FinishReason
    experts: npt.NDArray[Any] | None = None


def completion_of(
    read: Callable[[Mapping[str, Any]], Sampled],
    reply: Mapping[str, Any],
    request: GenerationRequest,
    index: int,
    prefix: Prefix | None,
    version_of: Callable[[Any], int],
    *,
    vocab_size: int,
    routers: ServedRouters | None = None,
) -> Completion:
    """Check what a server sampled and put it behind what was kept.

    Args:
        read: reads a reply of this kind of server.
        reply: of the server.
        request: what was asked of the engine.
        index: of the completion in it.
        prefix: what was kept of the one that came with it.
        version_of: reads the label of a version, and raises for one that is none.
        vocab_size: token ids are below it.
        routers: of the model, if what they chose is recorded.

    Raises:
        ValueError: the reply lacks something, or contradicts itself.
    """
    try:
        sampled = read(reply)
        runs = _runs(sampled.spans, len(sampled.token_ids), version_of)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply is not as expected: {error!r}") from error
    token_ids, reason = sampled.token_ids, sampled.reason
    if [token for token, _ in sampled.scores] != list(token_ids):
        raise ValueError(f"{len(token_ids)} tokens and {len(sampled.scores)} log-probabilities do not belong together")
    if (other := next((token for token in token_ids if not 0 <= token < vocab_size), None)) is not None:
        raise ValueError(f"token {other} is none of the model's vocabulary of {vocab_size}")
    if len(token_ids) > (most := request.sampling.max_new_tokens - (len(prefix.token_ids) if prefix else 0)):
        raise ValueError(f"{len(token_ids)} tokens were sampled where at most {most} were asked for")
    log_probs = [value for _, value in sampled.scores]
    if not np.isfinite(log_probs).all():
        raise ValueError("a log-probability is not finite")
    sampling = request.sampling
    if sampling.ignore_eos and (end := _first_stop(token_ids, sampling.stop_token_ids)) is not None:
        token_ids, log_probs, reason = token_ids[:end], log_probs[:end], FinishReason.STOP
        runs = tuple(run for run in runs if run[0] < end)
    made = _joined(token_ids, log_probs, runs, reason, prefix)
    if made is None:
        return unstarted_completion(request, index)
    if routers is None:
        return made
    experts = record_of(routers, sampled.experts, request, prefix, made.token_ids.size)
    if experts is None and reason is not FinishReason.ABORTED:
        raise ValueError("the reply lacks the experts that were chosen: the server was started without the flag")
    return replace(made, experts=experts)


def _first_stop(token_ids: Sequence[int], stops: Sequence[int]) -> int | None:
    """Return how many tokens there are up to the first one that ends the completion."""
    return next((place + 1 for place, token in enumerate(token_ids) if token in stops), None)


def _runs(
    spans: Sequence[Mapping[str, Any]], num: int, version_of: Callable[[Any], int]
) -> tuple[tuple[int, int], ...]:
    """Make run-length versions of half-open spans over all tokens."""
    runs: list[tuple[int, int]] = []
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise ValueError(f"version spans do not follow each other: {spans}")
        if span["end"] > end:
            runs.append((end, version_of(span["version"])))
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
