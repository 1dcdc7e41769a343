"""The section of the weights' way: what has no effect is refused, with both fields and the way out."""

from typing import Any

import pytest

from flotilla.shared.config.rules.publication import decide_publication, publishes_adapters
from flotilla.shared.config.sections.publication import PublicationConfig, TransportChoice
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec, spec_document


def test_slices_default_to_8_mib() -> None:
    assert PublicationConfig().slice_bytes == 8 << 20
    assert PublicationConfig(slice_megabytes=16).slice_bytes == 16 << 20


def adapting(
    lora: str = "adapters",
    *,
    engine: dict[str, Any] | None = None,
    quantisation: dict[str, Any] | None = None,
    rank: int = 4,
    on_weight_update: str | None = None,
    sharing: str | None = None,
    **publication: Any,
) -> dict[str, Any]:
    return {
        "model": spec_document()["model"] | {"lora": {"rank": rank, "quantisation": quantisation}},
        "rollout": {"engine": engine or {}},
        "asynchrony": {"publication": {"lora": lora, **publication}}
        | ({} if on_weight_update is None else {"on_weight_update": on_weight_update}),
        "resources": {} if sharing is None else {"sharing": sharing},
    }


@pytest.mark.parametrize(
    ("transport", "host", "expected"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "localhost", False),
        ("auto", "10.0.0.2", True),
        ("auto", "0.0.0.0", True),
        ("auto", "trainer-0", True),
        ("group", "127.0.0.1", True),
        ("gloo", "127.0.0.1", True),
        ("shared_memory", "10.0.0.2", False),
        ("pull", "10.0.0.2", False),
    ],
)
def test_a_process_that_broadcasts_is_started_ahead_where_images_are_not_mapped(
    transport: str, host: str, expected: bool
) -> None:
    assert PublicationConfig(transport=TransportChoice(transport)).expects_broadcasts(host) is expected


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"asynchrony": {"publication": {"transport": "pull", "slice_megabytes": 8}}}, "slice_megabytes 8"),
        ({"asynchrony": {"publication": {"transport": "shared_memory", "slice_megabytes": 8}}}, "transport to auto"),
        ({"asynchrony": {"publication": {"transport": "shared_memory", "delta": {}}}}, "publication.delta"),
        ({"asynchrony": {"publication": {"transport": "pull", "delta": {}}}}, "publication.delta"),
        ({"asynchrony": {"publication": {"transport": "nccl"}}}, "rollout.engine.device auto"),
        ({"asynchrony": {"publication": {"lora": "adapters"}}}, "without model.lora"),
        ({"asynchrony": {"publication": {"lora": "merged"}}}, "without model.lora"),
        (adapting(delta={}), "asynchrony.publication.delta sends what differs of whole weights"),
        (adapting(engine={"kind": "sglang"}), "rollout.engine.kind sglang takes whole weights: on a CPU its adapters"),
        (
            adapting(engine={"kind": "vllm", "url": "http://localhost:1"}),
            "the server at rollout.engine.url takes whole",
        ),
        (adapting(engine={"kind": "vllm"}, on_weight_update="continue"), "on_weight_update continue needs whole"),
        (adapting(engine={"kind": "vllm"}, rank=513), "model.lora.rank 513 is above the 512 that vLLM has room for"),
        (
            adapting(engine={"kind": "vllm", "device": "cuda:0"}, sharing="time"),
            "resources.sharing time has the server",
        ),
        (adapting(quantisation={"dtype": "nf4"}), "model.lora.quantisation makes another base"),
        (
            {
                "asynchrony": {"publication": {"wire_dtype": "bfloat16"}},
                "model": spec_document()["model"] | {"dtype": "bfloat16"},
            },
            "model.dtype",
        ),
    ],
)
def test_what_has_no_effect_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        a_spec(**sections)

    assert words in str(caught.value.errors)


BOTH = {"torch", "torch with adapters"}


@pytest.mark.parametrize(
    ("sections", "rollouts", "decided"),
    [
        (adapting("auto"), {"one": BOTH}, ("adapters", None)),
        (adapting("auto"), {}, None),
        (adapting("merged"), {"one": BOTH}, None),
        ({}, {"one": BOTH}, None),
        (adapting("auto"), {"one": BOTH, "old": {"torch"}}, ("merged", "the engine of old takes whole weights")),
        (
            adapting("auto", delta={}),
            {"one": BOTH},
            ("merged", "asynchrony.publication.delta sends what differs of whole weights"),
        ),
        (
            adapting("auto", engine={"kind": "vllm"}),
            {"one": {"vllm", "vllm with adapters"}},
            ("merged", "rollout.engine.kind vllm takes only adapters if asynchrony.publication.lora is adapters"),
        ),
    ],
)
def test_adapters_travel_alone_where_every_engine_takes_them_and_nothing_needs_whole_weights(
    sections: dict[str, Any], rollouts: dict[str, set[str]], decided: tuple[str, str | None] | None
) -> None:
    assert decide_publication(a_spec(**sections), rollouts) == decided


def test_adapters_are_merged_as_long_as_nothing_is_decided() -> None:
    assert not publishes_adapters(a_spec(**adapting("auto")))
    assert publishes_adapters(a_spec(**adapting("adapters")))
