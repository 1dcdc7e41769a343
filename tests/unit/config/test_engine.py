"""Which engine a spec may ask for, with what, and what it may require of it."""

from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.engine import SglangEngineConfig, TorchEngineConfig, VllmEngineConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.engine import EngineCapability
from tests.unit.config.test_spec_text import a_document


def with_engine(engine: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    return a_document(rollout={"engine": {"context_tokens": 4096, **engine}, **rollout})


def test_an_engine_without_a_kind_is_the_embedded_one() -> None:
    engine = validate_spec(with_engine({"slots": 3})).rollout.engine

    assert isinstance(engine, TorchEngineConfig) and engine.slots == 3


def test_options_of_sglang_survive_the_way_over_the_wire() -> None:
    options = {"tp_size": 2, "mem-fraction-static": 0.7, "quantization": "fp8", "cuda_graph_bs_decode": [1, 2]}
    spec = validate_spec(with_engine({"kind": "sglang", "options": options | {"disable_radix_cache": True}}))

    again = validate_spec(spec.model_dump(mode="json"))

    assert again == spec
    assert isinstance(again.rollout.engine, SglangEngineConfig)
    assert dict(again.rollout.engine.options)["mem-fraction-static"] == 0.7


@pytest.mark.parametrize(
    ("engine", "path", "words"),
    [
        ({"kind": "sglang", "options": {"max-running-requests": 4}}, "options", "it is set by rollout.engine.slots"),
        ({"kind": "sglang", "options": {"--dtype": "half"}}, "options", "it is set by model.dtype"),
        ({"kind": "sglang", "options": {"dp_size": 2}}, "options", "resources.rollouts"),
        ({"kind": "sglang", "options": {"max-running": 4}}, "options", "take it for a longer name"),
        ({"kind": "sglang", "options": {"tp size": 4}}, "options", "no name of a server argument"),
        ({"kind": "sglang", "options": {"load-format": "dummy"}}, "options", "it is set by model.path"),
        ({"kind": "sglang", "options": {"delete_ckpt_after_loading": True}}, "options", "not the server's to delete"),
        ({"kind": "sglang", "options": {"sidecar": "a.b"}}, "options", "names a module, which would be imported"),
        ({"kind": "sglang", "options": {"hicache-storage-backend": "dynamic"}}, "options", "would be imported"),
        ({"kind": "sglang", "options": {"unified_cache_external_l": "dynamic"}}, "options", "would be imported"),
        ({"kind": "sglang", "options": {"max_queued_requests": 3}}, "options", "never answered"),
        ({"kind": "sglang", "url": "http://a:1", "options": {"tp_size": 2}}, "", "have no effect with"),
        ({"kind": "sglang", "url": "http://a:1", "update_weights_from": "tensor"}, "", "leave rollout.engine.url or"),
        ({"kind": "sglang", "url": "ftp://a"}, "url", "pattern"),
        ({"kind": "vllm", "url": "http://localhost:abc"}, "url", "not a URL"),
        ({"kind": "vllm", "url": "http://localhost:99999"}, "url", "port 99999"),
        ({"kind": "sglang", "threads": 2}, "threads", ""),
        ({"kind": "vllm", "options": {"max_num_seqs": 4}}, "options", "it is set by rollout.engine.slots"),
        ({"kind": "vllm", "options": {"max-lora-rank": 8}}, "options", "it is set by model.lora"),
        ({"kind": "vllm", "options": {"no-enable-scale-out": True}}, "options", "how it is asked"),
        ({"kind": "vllm", "options": {"worker-extension-cls": "a.B"}}, "options", "which would be imported"),
        ({"kind": "vllm", "options": {"compilation_config.backend": "a"}}, "options", "no name of a server argument"),
        ({"kind": "unheard of"}, "", "vllm"),
    ],
)
def test_what_an_engine_cannot_be_given_is_refused_with_the_reason(
    engine: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(with_engine(engine))

    [entry] = caught.value.errors
    assert str(entry["path"]).startswith("rollout.engine") and path in str(entry["path"])
    assert words in str(entry["allowed"])


@pytest.mark.parametrize("capability", list(EngineCapability))
def test_a_spec_that_requires_what_its_engine_does_not_promise_is_refused(capability: EngineCapability) -> None:
    for engine in (TorchEngineConfig(), SglangEngineConfig(kind="sglang"), VllmEngineConfig(kind="vllm")):
        document = with_engine({"kind": engine.kind}, requires=[capability.value])
        if capability in engine.CAPABILITIES:
            assert validate_spec(document).rollout.requires == (capability,)
            continue
        with pytest.raises(InvalidSpec, match=f"requires {capability.value}.*kind {engine.kind} does not promise"):
            validate_spec(document)


def test_reading_ahead_needs_a_spare_copy() -> None:
    document = with_engine({"kind": "sglang"})
    overlap: dict[str, Any] = {"asynchrony": {"publication": {"overlap_load": True}}}

    assert validate_spec(document).asynchrony.publication.overlap_load is None
    with pytest.raises(InvalidSpec, match="overlap_load needs an engine with a spare copy"):
        validate_spec(document | overlap)


DISTRIBUTED = {"kind": "sglang", "update_weights_from": "distributed"}


@pytest.mark.parametrize(
    ("engine", "sections", "words"),
    [
        ({}, {"asynchrony": {"publication": {"transport": "pull"}}}, "publication.transport pull does not"),
        ({}, {"asynchrony": {"publication": {"transport": "shared_memory"}}}, "shared_memory does not"),
        ({}, {"asynchrony": {"publication": {"delta": {}}}}, "leave asynchrony.publication.delta out"),
        ({}, {"resources": {"sharing": "time"}}, "leave resources.sharing time out"),
        ({"options": {"pp-size": 2}}, {}, "the 2 stages of pp_size"),
    ],
)
def test_what_a_group_with_engines_cannot_do_is_refused(
    engine: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidSpec, match=words):
        validate_spec(with_engine(DISTRIBUTED | engine) | sections)


def test_a_broadcast_to_engines_carries_more_than_one_to_processes() -> None:
    assert validate_spec(with_engine({})).slice_bytes == 8 << 20
    assert validate_spec(with_engine(DISTRIBUTED)).slice_bytes == 256 << 20
    chosen = {"asynchrony": {"publication": {"slice_megabytes": 16}}}
    assert validate_spec(with_engine(DISTRIBUTED) | chosen).slice_bytes == 16 << 20


def test_an_engine_has_a_rank_for_each_device_of_its_model() -> None:
    assert validate_spec(with_engine(DISTRIBUTED)).engine_ranks == 1
    assert validate_spec(with_engine(DISTRIBUTED | {"options": {"tp-size": 4}})).engine_ranks == 4
    devices = {"resources": {"rollouts": {"devices": 2}}}
    assert validate_spec(with_engine(DISTRIBUTED) | devices).engine_ranks == 2


@pytest.mark.parametrize("name", ["trust_remote_code", "--trust-remote-code", "custom-weight-loader", "forward_hooks"])
def test_an_option_that_runs_code_of_a_model_or_of_a_spec_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="may not be given"):
        SglangEngineConfig.model_validate({"kind": "sglang", "options": {name: True}})


@pytest.mark.parametrize(
    ("sampling", "is_refused"),
    [
        ({"temperature": 0.7}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.9, "temperature": 0.7}, True),
        ({"top_k": 5, "temperature": 1.2}, True),
        ({"min_p": 0.1}, False),
        ({"min_p": 0.1, "temperature": 1.2}, True),
    ],
)
def test_what_vllm_measures_after_a_cut_is_not_taken_for_the_policys(
    sampling: dict[str, float], is_refused: bool
) -> None:
    document = with_engine({"kind": "vllm"}, sampling=sampling)

    assert not validate_spec(with_engine({"kind": "sglang"}, sampling=sampling)).rollout.records_the_cut
    if is_refused:
        with pytest.raises(InvalidSpec, match="set old_log_probs to recompute"):
            validate_spec(document)
    else:
        validate_spec(document)
    for old in ("recompute", "recompute_at_version"):
        spec = validate_spec(document | {"algorithm": {"old_log_probs": old}})
        assert spec.rollout.records_the_cut is is_refused


def test_a_loss_without_a_ratio_may_weigh_by_what_was_sampled_from() -> None:
    document = with_engine({"kind": "vllm"}, sampling={"top_p": 0.9, "temperature": 0.7})
    loss: dict[str, Any] = {"policy_loss": {"kind": "policy_gradient"}}
    against_the_sampler = {"correction": {"numerator": "current"}}

    validate_spec(document | {"algorithm": loss | against_the_sampler})
    validate_spec(document | {"algorithm": loss | {"correction": None}})
    with pytest.raises(InvalidSpec, match="set old_log_probs to recompute"):
        validate_spec(document | {"algorithm": loss | {"correction": None, "kl": {"placement": "reward"}}})


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("sglang", "repetition_penalty", "SGLang's log-probabilities are of the penalised distribution"),
        ("sglang", "presence_penalty", "SGLang's log-probabilities are of the penalised distribution"),
        ("sglang", "frequency_penalty", "SGLang's log-probabilities are of the penalised distribution"),
        ("vllm", "presence_penalty", "vLLM counts what an interrupted completion had as prompt"),
        ("vllm", "frequency_penalty", "vLLM counts what an interrupted completion had as prompt"),
        ("vllm", "repetition_penalty", None),
        ("torch", "repetition_penalty", None),
        ("torch", "frequency_penalty", None),
    ],
)
def test_a_penalty_is_refused_where_an_engine_means_something_else_by_it(kind: str, name: str, why: str | None) -> None:
    document = with_engine({"kind": kind}, sampling={name: 1.2})

    if why is None:
        validate_spec(document)
    else:
        with pytest.raises(InvalidSpec, match=f"{name}: {why}"):
            validate_spec(document)


def test_a_penalty_at_a_temperature_counts_as_a_cut_with_vllm() -> None:
    sampling = {"repetition_penalty": 1.2, "temperature": 0.7}

    validate_spec(with_engine({"kind": "torch"}, sampling=sampling))
    with pytest.raises(InvalidSpec, match="set old_log_probs to recompute"):
        validate_spec(with_engine({"kind": "vllm"}, sampling=sampling))
