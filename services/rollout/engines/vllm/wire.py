"""What goes to ``/inference/v1/generate`` and what comes back, and what ``/metrics`` says; pure functions."""

import re
from collections.abc import Mapping
from typing import Any

from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.resumption import Prefix
from flotilla.services.rollout.engines.servers.completions import Sampled
from flotilla.shared.schemas.trajectory import FinishReason

Body = dict[str, Any]
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
NO_LOG_PROB = -9999.0
"""What the server writes for one that is not a number, or minus infinity."""
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_SEED = 1 << 63


def generate_body(request: GenerationRequest, index: int, prefix: Prefix | None, request_id: str, serving: int) -> Body:
    """Make the body that asks for one completion; arguments as of ``Dialect.body``."""
    kept = prefix.token_ids if prefix is not None else ()
    return {
        "request_id": request_id,
        "token_ids": [*request.prompt_ids, *kept],
        "sampling_params": _sampling(request.sampling, request.seeds[index], len(kept)),
        "cache_salt": str(serving),
    }


def _sampling(sampling: SamplingParameters, seed: int, num_kept: int) -> Body:
    body: Body = {
        "max_tokens": sampling.max_new_tokens - num_kept,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        # The server's random numbers begin with the request: what goes on must not draw those of its beginning again.
        "seed": (seed + num_kept * SEED_STRIDE) % MAX_SEED,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.min_p and not sampling.greedy:
        body["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        body["repetition_penalty"] = sampling.repetition_penalty
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def sampled_of(reply: Mapping[str, Any]) -> Sampled:
    """Read a reply; errors as of ``Dialect.sampled``."""
    [choice] = reply["choices"]
    content = (choice.get("logprobs") or {}).get("content") or ()
    return Sampled(
        token_ids=[int(token) for token in choice.get("token_ids") or ()],
        scores=[(int(each["token_id"]), _log_prob(float(each["logprob"]))) for each in content],
        spans=list(choice.get("weight_versions") or ()),
        reason=REASONS[choice["finish_reason"]],
    )


def _log_prob(value: float) -> float:
    return float("nan") if value <= NO_LOG_PROB else value


def metric_of(page: str, name: str) -> int:
    """Add up the samples of a metric on a page of ``/metrics``; 0 if there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return int(sum(map(float, found)))
