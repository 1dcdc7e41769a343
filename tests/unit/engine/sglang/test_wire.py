"""What is asked of SGLang's ``/generate``, and how its replies are read."""

import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Prefix, PromptImage
from flotilla.services.rollout.engines.servers.completions import completion_of, new_request_id
from flotilla.services.rollout.engines.servers.dialect import ShownImages
from flotilla.services.rollout.engines.sglang.wire import generate_body, limits_of, sampled_of, with_pictures
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import CannotBeShown
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.vision.files import plain_of
from tests.contract.engine.requests import a_request
from tests.vision_models import IMAGE_TOKEN, a_picture

BEGUN = Prefix((8, 9), (-0.5, -0.25), ((0, 3),))


def a_reply(tokens: tuple[int, ...] = (5, 6, 7), reason: str = "length", **changes: Any) -> dict[str, Any]:
    facts = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-0.1 * token, token, None] for token in tokens],
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
    }
    return {"output_ids": list(tokens), "meta_info": facts | changes}


def test_all_ids_have_one_length_so_that_no_abort_hits_another() -> None:
    assert {len(new_request_id()) for _ in range(50)} == {32}


def test_a_prefix_goes_behind_the_prompt_and_counts_as_sampled() -> None:
    body = generate_body(a_request((1, 2), max_new_tokens=10, top_k=4, min_p=0.2), "r", BEGUN, serving=7)

    assert body["input_ids"] == [1, 2, 8, 9]
    assert body["sampling_params"]["max_new_tokens"] == 8
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["min_p"]) == (4, 0.2)
    assert body["cache_salt"] == "7"


def test_greedy_is_temperature_zero_and_all_tokens_are_minus_one() -> None:
    params = generate_body(a_request(greedy=True, temperature=0.3, top_p=0.5), "r", None, serving=0)["sampling_params"]

    assert (params["temperature"], params["top_k"], params["top_p"]) == (0.0, -1, 1.0)


def test_tokens_of_a_prefix_keep_their_log_probs_and_versions() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]

    completion = completion_of(sampled_of, a_reply(weight_versions=spans), a_request(), 0, BEGUN, int, vocab_size=96)

    assert completion.token_ids.tolist() == [8, 9, 5, 6, 7]
    np.testing.assert_allclose(completion.log_probs, [-0.5, -0.25, -0.5, -0.6, -0.7], atol=1e-6)
    assert completion.versions == ((0, 3), (3, 4))
    assert completion.num_resumed == 2


def test_a_stop_token_that_the_server_was_not_told_ends_the_completion() -> None:
    request = a_request(ignore_eos=True, stop_token_ids=(6,))

    assert "stop_token_ids" not in generate_body(request, "r", None, serving=0)["sampling_params"]
    completion = completion_of(sampled_of, a_reply(), request, 0, None, int, vocab_size=96)
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([5, 6], FinishReason.STOP)


def test_an_abort_before_the_first_token_gives_what_the_request_came_with() -> None:
    reply = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}

    assert completion_of(sampled_of, reply, a_request(), 0, None, int, vocab_size=96).token_ids.size == 0
    kept = completion_of(sampled_of, reply, a_request(prefixes=[BEGUN]), 0, BEGUN, int, vocab_size=96)
    assert (kept.token_ids.tolist(), kept.finish_reason) == ([8, 9], FinishReason.ABORTED)


@pytest.mark.parametrize(
    "reply",
    [
        {"output_ids": [5]},
        a_reply(output_token_logprobs=[[-0.1, 5, None]]),
        a_reply(output_token_logprobs=[[-0.1], [-0.1], [-0.1]]),
        a_reply(weight_versions=[{"version": "3", "end": 3}]),
        a_reply(output_token_logprobs=[[float("nan"), token, None] for token in (5, 6, 7)]),
        a_reply(weight_versions=[{"version": "3", "start": 0, "end": 2}]),
        a_reply(weight_versions=[{"version": "3", "start": 1, "end": 3}]),
        a_reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]),
        a_reply(finish_reason={"type": "unheard of"}),
        a_reply((5, 96, 7)),
        a_reply((5, -1, 7)),
        a_reply((5, 1 << 40, 7)),
        a_reply((5,) * 9),
    ],
)
def test_a_reply_that_contradicts_itself_is_not_used(reply: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reply|belong|finite|spans|invalid literal|vocabulary|at most"):
        completion_of(sampled_of, reply, a_request(), 0, None, int, vocab_size=96)


START, VIDEO = IMAGE_TOKEN + 50, IMAGE_TOKEN + 51


def shown(*images: bytes) -> ShownImages:
    placed = [PromptImage(4 * number + 1, 3, image) for number, image in enumerate(images)]
    return ShownImages(placed, SimpleNamespace(token_id=IMAGE_TOKEN, marks=frozenset({VIDEO, START})), 3)  # type: ignore[arg-type]


def test_images_are_sent_as_they_are_seen_with_one_token_for_each() -> None:
    first, other = a_picture(seed=1), a_picture(seed=2, form="BMP")
    body = {"input_ids": [7, *[IMAGE_TOKEN] * 3, 8, *[IMAGE_TOKEN] * 3, 9], "rid": "a"}

    found = with_pictures(body, shown(first, other))

    assert found["input_ids"] == [7, IMAGE_TOKEN, 8, IMAGE_TOKEN, 9]
    assert found["rid"] == "a"
    sent = [base64.b64decode(each.removeprefix("data:image/png;base64,")) for each in found["image_data"]]
    assert sent == [first, plain_of(other)]


@pytest.mark.parametrize("sampled", [IMAGE_TOKEN, START, VIDEO])
def test_a_sampled_token_by_which_the_server_finds_images_is_refused_behind_images(sampled: int) -> None:
    ids = [START, *[IMAGE_TOKEN] * 3, 8]
    images = shown(a_picture())

    assert with_pictures({"input_ids": ids}, images)["input_ids"] == [START, IMAGE_TOKEN, 8]
    with pytest.raises(CannotBeShown, match="sampled by the policy"):
        with_pictures({"input_ids": [*ids, sampled]}, images)


def test_bounds_of_the_spec_are_the_servers() -> None:
    given = limits_of(ImagesConfig(max_pixels=900, max_per_prompt=2))

    assert json.loads(str(given["mm_process_config"])) == {"image": {"max_pixels": 900}}
    assert json.loads(str(given["limit_mm_data_per_request"])) == {"image": 2}
    assert "mm_process_config" not in limits_of(ImagesConfig())
