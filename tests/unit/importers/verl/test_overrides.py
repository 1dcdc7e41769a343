"""verl's ``override_config`` becomes ``model.overrides``."""

from typing import Any

import pytest

from flotilla.importers.build import Imported
from flotilla.importers.parameter import Verdict
from tests.unit.importers.sources import BASES, import_flat

CONFIG = "actor_rollout_ref.model.override_config"


def imported(values: dict[str, Any]) -> Imported:
    return import_flat("verl", {**BASES["verl"], **{f"{CONFIG}.{name}": value for name, value in values.items()}})


@pytest.mark.parametrize("below", ["", "model_config."])
def test_values_of_the_models_config_are_overrides(below: str) -> None:
    found = imported({f"{below}max_position_embeddings": 32768, f"{below}rope_scaling.factor": 2.0,
                      "attn_implementation": "sdpa"})  # fmt: skip

    assert found.spec is not None and found.may_run(), found.report.render()
    assert found.spec.model.overrides == {"max_position_embeddings": 32768, "rope_scaling": {"factor": 2.0}}
    assert found.spec.model.attention != "flash_attention_2"


@pytest.mark.parametrize("name", ["attention_dropout", "embd_pdrop", "resid_pdrop"])
def test_dropout_of_0_is_what_training_has_and_more_is_refused(name: str) -> None:
    none, some = imported({name: 0.0}), imported({name: 0.1})

    assert none.may_run() and none.spec is not None and none.spec.model.overrides == {}
    assert [each.verdict for each in none.report.entries if each.name == f"{CONFIG}.{name}"] == [Verdict.IGNORED]
    assert [each.name for each in some.report.refused] == [f"{CONFIG}.{name}"]


def test_what_another_key_of_a_spec_says_is_refused_with_it() -> None:
    found = imported({"model_config.torch_dtype": "float16"})

    assert [(each.name, each.detail) for each in found.report.refused] == [
        (f"{CONFIG}.model_config.torch_dtype", "set model.dtype")
    ]
