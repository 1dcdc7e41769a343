"""What a launch file asks for and the fleet does not do is refused for what it is, with a way out."""

from typing import Any

import pytest

from flotilla.importers.build import build
from flotilla.importers.openrlhf.launch import read_openrlhf
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read, system_of
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, import_flat

ASYNC = {"data.train_batch_size": 0, "rollout.total_rollout_steps": 10_000}


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("dtype", "float32", True),
        ("dtype", "fp16", True),
        ("dtype", "bf16", False),
        ("dtype", None, False),
        ("mixed_precision.param_dtype", "fp32", True),
        ("mixed_precision.param_dtype", "bf16", False),
        ("mixed_precision.reduce_dtype", "fp32", False),
    ],
)
def test_an_element_type_of_the_trainer_alone_is_refused(name: str, value: str | None, is_refused: bool) -> None:
    full = f"actor_rollout_ref.actor.fsdp_config.{name}"

    report = import_flat("verl", {**BASES["verl"], full: value}).report

    assert [entry.name for entry in report.refused] == ([full] if is_refused else [])


def test_fine_tuning_beside_reinforcement_is_refused_for_what_it_is() -> None:
    text = "model: {partial_pretrain: m, lora_rank: 0}\noptim: {lr: 2e-5}\ndata: {response_key: a, max_length: 9}"

    report = build(SYSTEMS["verl"], read("verl", text, (), {}, source="sft.yaml")).report

    refused = {entry.name: entry.detail for entry in report.refused}
    assert set(refused) == {"model.partial_pretrain", "optim.lr", "data.response_key", "data.max_length"}
    assert "imported by themselves" in refused["optim.lr"] and "samples its answers" in refused["data.response_key"]


def test_parameters_of_verls_offline_scoring_are_refused_among_those_of_training() -> None:
    text = "data: {path: answers.parquet, data_source_key: source}\nactor_rollout_ref: {model: {path: model}}"
    given = read("verl", text, (), {}, source="both.yaml")

    report = build(system_of("verl", given), given).report

    assert {entry.name for entry in report.refused} == {"data.path", "data.data_source_key"}
    assert all("main_eval" in entry.detail for entry in report.refused)


@pytest.mark.parametrize(
    ("more", "way_out"), [({}, "lower data.train_batch_size"), (ASYNC, "raise rollout.total_rollout_steps")]
)
def test_too_few_prompts_for_one_step_are_said_with_the_way_out(more: dict[str, Any], way_out: str) -> None:
    few = {**more, "rollout.total_rollout_steps": 3} if more else {"trainer.total_training_steps": None}

    report = import_flat("verl", {**BASES["verl"], **few}, rows=3).report

    assert [each for each in report.problems if way_out in each]


@pytest.mark.parametrize("flag", ["--pretrain", "--prompt_data", "--input_key", "--actor_learning_rate", "--seed"])
def test_a_flag_that_has_lost_its_value_is_named(flag: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        build(SYSTEMS["openrlhf"], read_openrlhf([flag, "--max_steps", "3"]))

    assert [entry["path"] for entry in caught.value.errors] == [flag]


@pytest.mark.parametrize(
    ("system", "name", "way_out"),
    [
        ("verl", "data.response_key", "verl.trainer.main_eval or sft_trainer"),
        ("openrlhf", "--output_key", "a script of train_sft is imported"),
    ],
)
def test_what_the_fleet_does_in_another_way_is_refused_with_that_way(system: str, name: str, way_out: str) -> None:
    row = SYSTEMS[system].find(name)

    assert row is not None and row.verdict is Verdict.REFUSED
    assert way_out in row.reason
