"""What goes to SGLang's ``/generate`` and what comes back; pure functions.

One completion is one request with an id of its own: the server aborts by prefix of the id, so all have the same length.

It decodes and resizes images itself. It is given pixels without loss, turned and on white as they are seen here, and
the bounds that the spec has, so that it finds the grid that the prompt's tokens were counted by.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.base import GenerationRequest, Prefix, SamplingParameters
from flotilla.services.rollout.engines.requests import condensed
from flotilla.services.rollout.engines.servers.completions import Sampled
from flotilla.services.rollout.engines.servers.dialect import ShownImages
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import CannotBeShown
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.vision.files import plain_of

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
UNKEPT: Mapping[str, str] = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "SGLANG_MM_AVOID_RETOKENIZE": "1"}
"""Of its environment: what a tower made of an image would outlive its weights; token ids are used as they come."""
KEPT_MB = 256
"""Processed images that it keeps, by content and bounds."""


def generate_body(
    request: GenerationRequest, request_id: str, prefix: Prefix | None, *, serving: int
) -> dict[str, Any]:
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


def _sampling(sampling: SamplingParameters, num_kept: int) -> dict[str, Any]:
    body: dict[str, Any] = {
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


def with_pictures(body: Mapping[str, Any], shown: ShownImages) -> dict[str, Any]:
    """Add the images to a request, and leave one token of each.

    Raises:
        CannotBeShown: the prompt, or what was kept, has one more token by which the server finds images.
    """
    token_ids = condensed(body["input_ids"], shown.images)
    processor, num_images = shown.processor, len(shown.images)
    num_marks = sum(map(token_ids.count, processor.marks))  # a template has one before each image
    if token_ids.count(processor.token_id) != num_images or num_marks > num_images:
        tokens = sorted({processor.token_id, *processor.marks})
        raise CannotBeShown(
            f"beside its images' own the sequence has one of the tokens {tokens}, sampled by the policy or in a "
            "message's text, by which an SGLang server finds images and videos: it would look for one more, so this "
            "sequence cannot go on there"
        )
    encoded = [base64.b64encode(plain_of(image.data)).decode("ascii") for image in shown.images]
    return {
        **body,
        "input_ids": list(token_ids),
        "image_data": [f"data:image/png;base64,{each}" for each in encoded],
    }


def limits_of(images: ImagesConfig) -> dict[str, str | int]:
    """Make the arguments for image processing and the number of images of a prompt."""
    bounds = {"min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    limits: dict[str, str | int] = {
        "limit_mm_data_per_request": json.dumps({"image": images.max_per_prompt}),
        "image_processor_backend": "pil",
        "mm_preprocess_cache_size_mb": KEPT_MB,
    }
    if given:
        limits["mm_process_config"] = json.dumps({"image": given})
    return limits


def sampled_of(reply: Mapping[str, Any]) -> Sampled:
    """Read a reply of ``/generate``; errors as of ``Dialect.sampled``."""
    facts = reply["meta_info"]
    return Sampled(
        token_ids=[int(token) for token in reply.get("output_ids") or ()],
        scores=[(int(triple[1]), float(triple[0])) for triple in facts.get("output_token_logprobs") or ()],
        spans=list(facts.get("weight_versions") or ()),
        reason=REASONS[facts["finish_reason"]["type"]],
        experts=None if (routed := facts.get("routed_experts")) is None else _experts(routed),
    )


def _experts(written: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(written, validate=True), np.dtype("<i4"))
