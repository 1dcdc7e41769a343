"""What goes to ``/generate`` and what comes back; pure functions.

One completion is one request with an id of its own: the server aborts by prefix of the id, so all have the same length.
"""

from collections.abc import Mapping
from typing import Any

from flotilla.services.rollout.engines.base import GenerationRequest, SamplingParameters
from flotilla.services.rollout.engines.resumption import Prefix
from flotilla.services.rollout.engines.servers.completions import Sampled
from flotilla.shared.schemas.trajectory import FinishReason

Body = dict[str, Any]
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


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
    if sampling.min_p and not sampling.greedy:
        body["min_p"] = sampling.min_p
    if sampling.stop_token_ids and not sampling.ignore_eos:
        # With ignore_eos the server ignores these as well: the completion is cut when it comes.
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def sampled_of(reply: Mapping[str, Any]) -> Sampled:
    """Read a reply of ``/generate``; errors as of ``Dialect.sampled``."""
    facts = reply["meta_info"]
    return Sampled(
        token_ids=[int(token) for token in reply.get("output_ids") or ()],
        scores=[(int(triple[1]), float(triple[0])) for triple in facts.get("output_token_logprobs") or ()],
        spans=list(facts.get("weight_versions") or ()),
        reason=REASONS[facts["finish_reason"]["type"]],
    )
