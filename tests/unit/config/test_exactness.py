"""What ``exactness: bitwise`` goes with."""

from typing import Any

import pytest

from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec, spec_document


def exact(**sections: Any) -> dict[str, Any]:
    document = spec_document(
        exactness="bitwise", asynchrony={"staleness_threshold": 0}, parallelism={"threads": 1}, **sections
    )
    document["rollout"] = {**document.get("rollout", {}), "engine": {"threads": 1}}
    return document


def test_an_on_policy_run_of_one_rank_and_equal_threads_may_be_exact() -> None:
    assert a_spec(**exact()).exactness == "bitwise"
    assert a_spec(**spec_document()).exactness is None


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("rollout", {"engine": {"kind": "sglang"}}, "rollout.engine.kind torch"),
        ("rollout", {"engine": {"threads": 2}}, "the same number as rollout.engine.threads and parallelism.threads"),
        ("rollout", {"engine": {}}, "the same number"),
        ("rollout", {"engine": {"threads": 1, "device": "cuda:0"}}, "cpu as rollout.engine.device"),
        ("parallelism", {"threads": 1, "ranks": 2}, "parallelism.ranks 1"),
        ("asynchrony", {"staleness_threshold": 0.5}, "staleness_threshold 0"),
        ("asynchrony", {"staleness_threshold": 0, "trigger_parameter_sync_step": 2}, "trigger_parameter_sync_step 1"),
        ("model", {"path": "m", "dtype": "bfloat16"}, "model.dtype float32"),
        ("model", {"path": "m", "lora": {"rank": 2}}, "no model.lora"),
        ("optimisation", {"steps": 2, "groups_per_mini_batch": 2, "epochs_per_step": 2}, "epochs_per_step 1"),
        ("optimisation", {"steps": 2, "groups_per_mini_batch": 2, "packing": "packed"}, "packing auto or padded"),
    ],
)
def test_what_makes_other_bits_is_refused_by_name(section: str, values: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSpec, match=told):
        a_spec(**(exact() | {section: values}))


def test_all_that_stands_against_it_is_named_at_once() -> None:
    with pytest.raises(InvalidSpec, match=r"staleness_threshold 0;.*model.dtype float32"):
        a_spec(**(exact() | {"asynchrony": {"staleness_threshold": 1}, "model": {"path": "m", "dtype": "bfloat16"}}))
