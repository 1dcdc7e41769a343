"""Our requests and our reading of replies, against traffic that was recorded with real servers on a CPU."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flotilla.services.rollout.engines.servers.completions import completion_of
from flotilla.services.rollout.engines.servers.dialect import Dialect
from flotilla.services.rollout.engines.sglang.engine import SglangDialect
from flotilla.services.rollout.engines.vllm.engine import VllmDialect
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.fake_server import FakeServer, unknown_fields
from tests.contract.engine.fake_sglang import FakeSglang
from tests.contract.engine.fake_vllm import FakeVllm
from tests.contract.engine.models import VOCAB, save_model
from tests.contract.engine.requests import a_request

GOLDENS = Path(__file__).parents[3] / "goldens"
REASONS = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
Record = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of server: how its traffic was written down."""

    name: str
    dialect: Dialect
    fake: Callable[[Path], FakeServer]
    sampled: Callable[[Record], tuple[list[int], list[float], list[Record], str]]
    """Tokens, log-probabilities, spans and reason of a reply."""
    asked: Callable[[Record], tuple[str, list[int], int, int]]
    """Id, prompt, most new tokens and seed of a body."""

    @property
    def records(self) -> list[Record]:
        return [json.loads(line) for line in (GOLDENS / self.name / "traffic.jsonl").read_text().splitlines()]

    @property
    def generated(self) -> list[Record]:
        return [record for record in self.records if record["endpoint"] == self.dialect.generate_path]

    @property
    def known(self) -> dict[str, dict[str, list[str]]]:
        found: dict[str, dict[str, list[str]]] = json.loads((GOLDENS / self.name / "requests.json").read_text())
        return found


def sampled_by_sglang(reply: Record) -> tuple[list[int], list[float], list[Record], str]:
    facts = reply["meta_info"]
    log_probs = [triple[0] for triple in facts["output_token_logprobs"]]
    return reply["output_ids"], log_probs, facts["weight_versions"], facts["finish_reason"]["type"]


def sampled_by_vllm(reply: Record) -> tuple[list[int], list[float], list[Record], str]:
    [choice] = reply["choices"]
    log_probs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return choice["token_ids"], log_probs, choice["weight_versions"], choice["finish_reason"]


SGLANG = Kind(
    "sglang",
    SglangDialect(),
    FakeSglang,
    sampled_by_sglang,
    lambda body: (body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"], 0),
)
VLLM = Kind(
    "vllm",
    VllmDialect(raw=False),
    FakeVllm,
    sampled_by_vllm,
    lambda body: (
        body["request_id"],
        body["token_ids"],
        body["sampling_params"]["max_tokens"],
        body["sampling_params"]["seed"],
    ),
)
KINDS = pytest.mark.parametrize("kind", [SGLANG, VLLM], ids=lambda kind: kind.name)


@KINDS
def test_every_way_in_which_a_completion_may_end_or_change_versions_is_recorded(kind: Kind) -> None:
    found = [kind.sampled(record["reply"]) for record in kind.generated]

    assert {reason for *_, reason in found} == {"length", "abort"}
    assert min(len(spans) for _, _, spans, _ in found) == 1 and max(len(spans) for _, _, spans, _ in found) > 10


@KINDS
def test_what_was_sent_has_only_fields_that_the_server_has(kind: Kind) -> None:
    for record in kind.records:
        fields = kind.known[f"{record['method']} {record['endpoint'].partition('?')[0]}"]
        assert not unknown_fields(record["body"], fields)


@KINDS
def test_the_same_request_is_made_today_and_its_recorded_reply_is_read(kind: Kind) -> None:
    for record in kind.generated:
        body = record["body"]
        request_id, prompt, max_new_tokens, seed = kind.asked(body)
        params = body["sampling_params"]
        request = a_request(
            prompt,
            seeds=(seed,),
            max_new_tokens=max_new_tokens,
            temperature=params["temperature"],
            ignore_eos=params["ignore_eos"],
        )
        token_ids, log_probs, spans, reason = kind.sampled(record["reply"])

        assert kind.dialect.body(request, 0, None, request_id, int(body["cache_salt"])) == body
        completion = completion_of(kind.dialect.sampled, record["reply"], request, 0, None, int, vocab_size=VOCAB)

        assert completion.token_ids.tolist() == token_ids
        np.testing.assert_array_equal(completion.log_probs, np.array(log_probs, np.float32))
        assert completion.versions == tuple((span["start"], int(span["version"])) for span in spans)
        assert completion.finish_reason is REASONS[reason]


@KINDS
async def test_the_server_in_memory_answers_with_what_the_real_one_has(kind: Kind, tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    path, [record, *_] = kind.dialect.generate_path, kind.generated
    async with httpx.AsyncClient(transport=kind.fake(tmp_path), base_url="http://recorded") as client:
        reply = (await client.post(path, json=record["body"])).json()
        unknown = await client.post(path, json=record["body"] | {"return_logprobs": True})

    assert fields_of(reply) <= fields_of(record["reply"])
    assert unknown.status_code == 400


def fields_of(reply: Any, path: str = "") -> set[str]:
    """Name the fields of a reply at any depth."""
    if isinstance(reply, list):
        return set().union(*(fields_of(each, path) for each in reply))
    if not isinstance(reply, dict):
        return set()
    return {f"{path}.{name}" for name in reply} | set().union(
        *(fields_of(value, f"{path}.{name}") for name, value in reply.items())
    )
