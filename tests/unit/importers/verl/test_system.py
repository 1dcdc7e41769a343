"""A whole configuration, such as Hydra writes beside a run, asks for nothing at verl's own values."""

from typing import Any

import pytest

from flotilla.importers.hydra import as_given
from flotilla.importers.parameter import Verdict
from flotilla.importers.verl.images import WHOLE
from flotilla.importers.verl.silent import VALUES
from flotilla.importers.verl.system import VERL, default_of
from tests.unit.importers.sources import BASES, import_flat

SILENT: dict[str, Any] = {
    f"{section}.{name}" if section else name: values[0]
    for sections, names in VALUES.items()
    for section in sections
    for name, values in names.items()
}
KEYS = {"data.image_key": "images", "data.video_key": "videos", "data.audio_key": "audios"}
READ = {
    "actor_rollout_ref.actor.calculate_sum_pi_squared": False, "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "reward_model.param_offload": False,
    "actor_rollout_ref.actor.sum_pi_squared_checkpointing": False, "actor_rollout_ref.ref.param_offload": False,
    "actor_rollout_ref.rollout.chat_scheduler": None, "actor_rollout_ref.rollout.moe_tensor_parallel_size": 1,
    "actor_rollout_ref.actor.checkpoint.strict": True,
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": None, "reward_model.micro_batch_size": None,
    "reward_model.num_workers": 1, "reward_model.ulysses_sequence_parallel_size": 1,
}  # fmt: skip
"""Further keys of such a configuration, which have rows of their own."""


def test_verls_own_values_of_all_that_is_not_read_ask_for_nothing() -> None:
    made = import_flat("verl", {**BASES["verl"], **SILENT})

    assert (made.report.refused, made.report.problems) == ([], [])
    assert {e.verdict for e in made.report.entries if e.name in SILENT} == {Verdict.IGNORED}


@pytest.mark.parametrize(
    ("name", "value"),
    [("actor_rollout_ref.model.lora.rank", 16), ("trainer.v1.trainer_mode", "separate_async"),
     ("actor_rollout_ref.actor.qat.enable", True), ("actor_rollout_ref.actor.load_weight", False)],
)  # fmt: skip
def test_another_value_is_refused_by_its_name(name: str, value: Any) -> None:
    assert name in SILENT

    made = import_flat("verl", {**BASES["verl"], name: value})

    assert [entry.name for entry in made.report.refused] == [name]


def test_columns_that_a_whole_configuration_names_by_itself_say_nothing_of_the_rows() -> None:
    values = {**BASES["verl"], **SILENT, **READ, **KEYS}
    whole = import_flat("verl", values)
    asked = import_flat("verl", {**BASES["verl"], **KEYS})

    assert len(values) >= WHOLE
    assert whole.document["data"].get("images") is None and whole.report.refused == []
    assert asked.document["data"]["images"] == {"column": "images"}
    assert {entry.name for entry in asked.report.refused} == {"data.video_key", "data.audio_key"}


def test_a_mapping_is_the_default_of_an_interpolation_to_its_last_brace() -> None:
    flat = {"a": "${oc.select:b,{x: 1, y: {z: 2}}}", "c": "${oc.select:d,{x: 1}}", "d": 3}

    values = {each.spelling: each.value for each in as_given(flat, set(), default_of, {})}

    assert VERL.find("b") is None
    assert values["a"] == {"x": 1, "y": {"z": 2}} and values["c"] == 3
