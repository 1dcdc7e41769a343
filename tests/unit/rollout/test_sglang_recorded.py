"""Our requests and our reading of replies, against traffic that was recorded with SGLang 0.5.23 on a CPU."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.rollout.engines.sglang.wire import completion_of, generate_body
from shared.schemas.trajectory import FinishReason
from tests.contract.engine.fake_sglang import REQUESTS, FakeSglang
from tests.contract.engine.models import save_model
from tests.contract.engine.requests import a_request

RECORDED = [json.loads(line) for line in (REQUESTS.parent / "traffic.jsonl").read_text().splitlines()]
KNOWN = json.loads(REQUESTS.read_text())
GENERATED = [record for record in RECORDED if record["endpoint"] == "/generate"]
REASONS = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def asked(record: dict[str, Any]) -> Any:
    """Rebuild what was asked of the engine."""
    body = record["body"]
    params = body["sampling_params"]
    return a_request(
        body["input_ids"],
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        ignore_eos=params["ignore_eos"],
    )


def test_every_way_in_which_a_completion_may_end_or_change_versions_is_recorded() -> None:
    spans = [len(record["reply"]["meta_info"]["weight_versions"]) for record in GENERATED]

    assert min(spans) == 1 and max(spans) > 10
    assert {record["endpoint"] for record in RECORDED} > {"/pause_generation", "/update_weights_from_disk"}


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["endpoint"])
def test_what_was_sent_has_only_fields_that_sglang_has(record: dict[str, Any]) -> None:
    fields = KNOWN[f"{record['method']} {record['endpoint'].partition('?')[0]}"]

    assert set(record["body"] or {}) <= set(fields["fields"])
    assert set((record["body"] or {}).get("sampling_params", {})) <= set(fields.get("sampling_params", ()))


@pytest.mark.parametrize("record", GENERATED, ids=lambda record: str(len(record["reply"]["output_ids"])))
def test_the_same_request_is_made_today_and_its_recorded_reply_is_read(record: dict[str, Any]) -> None:
    body, reply = record["body"], record["reply"]
    request = asked(record)

    assert generate_body(request, body["rid"], None, serving=int(body["cache_salt"])) == body
    completion = completion_of(reply, request, 0, None)
    facts = reply["meta_info"]
    assert completion.token_ids.tolist() == reply["output_ids"]
    recorded = np.array([log_prob for log_prob, _, _ in facts["output_token_logprobs"]], np.float32)
    np.testing.assert_array_equal(completion.log_probs, recorded)
    assert completion.versions == tuple((span["start"], int(span["version"])) for span in facts["weight_versions"])
    assert completion.finish_reason is REASONS[facts["finish_reason"]["type"]]


async def test_the_server_in_memory_answers_with_what_the_real_one_has(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    server = FakeSglang(tmp_path)
    async with httpx.AsyncClient(transport=server, base_url="http://recorded") as client:
        reply = (await client.post("/generate", json=GENERATED[0]["body"])).json()
        unknown = await client.post("/generate", json=GENERATED[0]["body"] | {"return_logprobs": True})

    recorded = GENERATED[0]["reply"]
    assert set(reply) <= set(recorded)
    assert set(reply["meta_info"]) <= set(recorded["meta_info"])
    assert [type(each) for each in reply["meta_info"]["output_token_logprobs"][0]] == [float, int, type(None)]
    assert unknown.status_code == 400
