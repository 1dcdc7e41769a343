"""Publications with 8 bits an element: what goes with them, and what they set by themselves."""

from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.rules.publication import needs_whole_weights
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec


def a_spec(quantisation: str | None = "int8", **sections: Any) -> ExperimentSpec:
    written: dict[str, Any] = {
        "name": "quantised",
        "model": {"path": "nowhere"},
        "data": {"path": "rows.jsonl"},
        "reward": {"components": [{"kind": "numeric"}]},
        "optimisation": {"steps": 5},
        "asynchrony": {"publication": {"quantisation": quantisation}},
    }
    return validate_spec(written | sections)


@pytest.mark.parametrize("quantisation", ["int8", "fp8"])
def test_the_correction_for_the_sampler_is_on_where_nothing_is_said(quantisation: str) -> None:
    spec = a_spec(quantisation)

    assert spec.algorithm.old_log_probs == "recompute"
    assert spec.algorithm.resolved_correction is not None and spec.algorithm.resolved_correction.weight is not None


def test_what_is_said_of_old_log_probs_stays() -> None:
    assert a_spec(algorithm={"old_log_probs": "rollout"}).algorithm.old_log_probs == "rollout"
    assert a_spec(None).algorithm.old_log_probs == "rollout"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"engine": {"kind": "sglang"}}}, "rollout.engine.kind sglang reads images of whole weights"),
        ({"rollout": {"engine": {"kind": "vllm"}}}, "rollout.engine.kind vllm reads images of whole weights"),
        ({"algorithm": {"old_log_probs": "recompute_at_version"}}, "set it to recompute"),
    ],
)
def test_whoever_cannot_have_them_is_named(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSpec, match=told):
        a_spec(**sections)


def test_a_job_that_publishes_nothing_is_refused_by_the_key_that_was_written() -> None:
    evaluated = {"path": "held_out.jsonl"}
    for sections in (
        {"job": {"kind": "sft"}, "reward": {}},
        {"job": {"kind": "evaluation"}, "evaluation": evaluated, "data": evaluated, "optimisation": {"steps": 1}},
    ):
        with pytest.raises(InvalidSpec, match=r"asynchrony\.publication\.quantisation has no effect while job\.kind"):
            a_spec(**sections)


def test_versions_of_a_finished_job_are_quantised_for_its_evaluation() -> None:
    spec = a_spec(job={"kind": "sft"}, evaluation={"path": "held_out.jsonl"})

    assert spec.asynchrony.publication.quantisation == "int8"
    assert spec.algorithm.old_log_probs == "rollout", "no sampled answer is trained"


def test_adapters_are_published_merged() -> None:
    found = needs_whole_weights(a_spec(model={"path": "nowhere", "lora": {"rank": 4}}))

    assert found is not None and "quantisation" in found
