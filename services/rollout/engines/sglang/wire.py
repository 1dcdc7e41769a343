"""What goes to ``/generate`` and what comes back; pure functions.

One completion is one request with an id of its own: the server aborts by prefix of the id, so all have the same length.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.rollout.engines.base import Completion, GenerationRequest, SamplingParameters
from services.rollout.engines.requests import unstarted_completion
from services.rollout.engines.resumption import Prefix
from shared.schemas.trajectory import FinishReason

Body = dict[str, Any]
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def new_request_id() -> str:
    """Make an id of a completion: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def generate_body(request: GenerationRequest, request_id: str, prefix: Prefix | None, *, serving: int) -> Body:
    """Make the body that asks for one completion.

    Args:
        request: what is asked of the engine.
        request_id: of this completion.
        prefix: tokens that it has already and keeps.
        serving: the version that serves now; completions begun under different ones share no KV cache.
    """
    kept = prefix.token_ids if prefix is not None else ()
    return {
        "rid": request_id,
        "input_ids": [*request.prompt_ids, *kept],
        "sampling_params": _sampling(request.sampling, len(kept)),
        "return_logprob": True,
        "cache_salt": str(serving),
    }


def _sampling(sampling: SamplingParameters, num_kept: int) -> Body:
    body: Body = {
        "max_new_tokens": sampling.max_new_tokens - num_kept,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": -1 if sampling.greedy or not sampling.top_k else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids and not sampling.ignore_eos:
        # With ignore_eos the server ignores these as well: the completion is cut when it comes.
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def completion_of(
    reply: Mapping[str, Any], request: GenerationRequest, index: int, prefix: Prefix | None
) -> Completion:
    """Read a reply of ``/generate``.

    Args:
        reply: the body.
        request: what was asked of the engine.
        index: of the completion in it.
        prefix: what was kept of the one that came with it.

    Raises:
        ValueError: the reply lacks something, contradicts itself, or names a version that is no number.
    """
    try:
        facts = reply["meta_info"]
        token_ids = [int(token) for token in reply.get("output_ids") or ()]
        triples = facts.get("output_token_logprobs") or ()
        reason = REASONS[facts["finish_reason"]["type"]]
        runs = _runs(facts.get("weight_versions") or (), len(token_ids))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the reply is not as expected: {error!r}") from error
    if [triple[1] for triple in triples] != token_ids:
        raise ValueError(f"{len(token_ids)} tokens and {len(triples)} log-probabilities do not belong together")
    log_probs = [float(triple[0]) for triple in triples]
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
