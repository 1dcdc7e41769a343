"""What servers say of experts becomes a record of the tokens that there are, or is refused."""

import base64
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.engines.base import Completion, Prefix
from flotilla.services.rollout.engines.servers.completions import completion_of
from flotilla.services.rollout.engines.servers.routed_experts import ServedRouters
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.services.rollout.engines.sglang import engine as sglang
from flotilla.services.rollout.engines.sglang.wire import sampled_of
from flotilla.shared.errors import ModelError
from flotilla.shared.schemas.routing import RoutedExperts, RoutingSizes
from flotilla.shared.schemas.trajectory import FinishReason
from tests.contract.engine.requests import a_request

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
ROUTERS = ServedRouters.of(CONFIG)
REQUEST = a_request((5, 6, 7))


def some_experts(tokens: int, seed: int = 0) -> Any:
    """Draw what a server sends: all layers, of which the one without a router means nothing."""
    drawn = np.random.default_rng(seed).random((tokens, 3, 8)).argsort(-1)[..., :2].astype(np.int32)
    drawn[:, 1] = 0
    return drawn


def a_reply(tokens: list[int], experts: Any, reason: str = "length") -> dict[str, Any]:
    """Make a reply as SGLang writes it."""
    facts: dict[str, Any] = {
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
        "finish_reason": {"type": reason},
    }
    if experts is not None:
        facts["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    return {"output_ids": tokens, "meta_info": facts}


def read(reply: Any, *, prefix: Prefix | None = None, routers: ServedRouters | None = ROUTERS) -> Completion:
    return completion_of(sampled_of, reply, REQUEST, 0, prefix, int, vocab_size=99, routers=routers)


def test_layers_without_a_router_are_left_out() -> None:
    experts = some_experts(6)

    found = read(a_reply([8, 9, 10, 11], experts))

    assert found.experts is not None
    assert found.experts.sizes == RoutingSizes(2, 2, 8)
    assert found.experts.ids().tolist() == experts[:, [0, 2]].tolist()
    assert read(a_reply([8, 9, 10, 11], experts), routers=None).experts is None


def test_tokens_that_were_kept_keep_their_experts() -> None:
    before = RoutedExperts.of(some_experts(4, seed=1)[:, [0, 2]], 8)
    prefix = Prefix((8, 9), (-1.0, -1.0), ((0, 0),), before)
    experts = some_experts(6)

    found = read(a_reply([10, 11], experts), prefix=prefix)

    assert found.experts is not None
    assert found.experts.ids().tolist() == [*before.ids().tolist(), *experts[4:, [0, 2]].tolist()]


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (some_experts(5), "experts of 5 tokens came with 7 tokens"),
        (some_experts(6).reshape(-1)[:-1], "35 experts of type"),
        (some_experts(6) + 7, "is none of 8: 7 to 14"),
        (np.zeros((6, 3, 2), np.int32), "an expert twice"),
        (None, "lacks the experts"),
    ],
)
def test_what_cannot_be_replayed_is_no_reply(experts: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(a_reply([8, 9, 10, 11], experts))


def test_an_aborted_answer_may_come_without() -> None:
    found = read(a_reply([8, 9], None, reason="abort"))

    assert found.finish_reason is FinishReason.ABORTED
    assert found.experts is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, 2)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (1,)),
        ({"model_type": "mixtral", "mlp_only_layers": None, "num_experts": None, "num_local_experts": 4}, (0, 1, 2)),
    ],
)
def test_the_layers_that_have_routers_are_those_of_the_config(changes: Any, expected: tuple[int, ...]) -> None:
    assert ServedRouters.of(CONFIG | changes).layers == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "deepseek_v3"}, "model_type deepseek_v3"),
        ({"model_type": "qwen3"}, "model_type qwen3"),
        ({"num_experts": None}, "number of experts per layer"),
        ({"mlp_only_layers": [0, 1, 2]}, "no layer"),
    ],
)
def test_other_models_are_refused_by_name(changes: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        ServedRouters.of(CONFIG | changes)


def test_servers_are_started_and_asked_for_experts_only_where_they_are_recorded(tmp_path: Any) -> None:
    for records in (False, True):
        settings = ServerSettings(tmp_path, python=tmp_path, records_experts=records)
        of_sglang = sglang.command_line(settings, port=1, key_file="key", label="0")
        body = sglang.SglangDialect(records_experts=records).body(REQUEST, 0, None, "id", 0)
        assert ("--enable-return-routed-experts" in of_sglang) is records
        assert bool(body.get("return_routed_experts")) is records
