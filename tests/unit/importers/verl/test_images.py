"""verl's images: read where the file names their column, or the names of model and files say that rows have some."""

from typing import Any

import pytest

from flotilla.importers.build import Imported, look_up
from flotilla.importers.parameter import UNSET
from tests.unit.importers.sources import BASES, import_flat

MODEL = "actor_rollout_ref.model"
GPUS = {"trainer.n_gpus_per_node": 8, f"{MODEL}.path": "Qwen/Qwen2.5-VL-7B-Instruct"}
GEOMETRY = {"data.train_files": "~/data/geo3k/train.parquet"}


def imported(**values: Any) -> Imported:
    return import_flat("verl", {**BASES["verl"], "algorithm.adv_estimator": "grpo", **values})


def column(found: Imported) -> Any:
    return look_up(found.document, "data.images.column")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data.image_key": "pictures"}, "pictures"),
        ({"data.image_key": None, **GEOMETRY}, UNSET),
        (GEOMETRY, "images"),
        ({f"{MODEL}.path": "/models/Qwen3-VL-8B-Instruct"}, "images"),
        ({f"{MODEL}.path": "/models/Qwen3-8B", "data.train_files": "gsm8k/train.parquet"}, UNSET),
    ],
)
def test_images_are_read_where_a_key_or_a_name_says_that_there_are_some(
    values: dict[str, Any], expected: object
) -> None:
    found = imported(**values)

    assert found.may_run(), found.report.render()
    assert column(found) == expected


def test_the_trainers_gpus_are_ranks_with_images_too() -> None:
    found = imported(**GPUS, **{"actor_rollout_ref.actor.fsdp_config.fsdp_size": 4})

    assert found.spec is not None and found.may_run(), found.report.render()
    assert found.spec.resources.trainer.devices == 8
    assert found.spec.parallelism.replicas == 2


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("ulysses_sequence_parallel_size", "sequence_parallel"),
        ("megatron.tensor_model_parallel_size", "tensor_parallel"),
        ("megatron.expert_model_parallel_size", "expert_parallel"),
    ],
)
def test_what_divides_rows_layers_or_experts_does_so_with_images_too(name: str, axis: str) -> None:
    found = imported(**GPUS, **{f"actor_rollout_ref.actor.{name}": 2})

    assert found.spec is not None and found.may_run(), found.report.render()
    axes = ("sequence_parallel", "tensor_parallel", "expert_parallel")
    assert {each: getattr(found.spec.parallelism, each) for each in axes} == dict.fromkeys(axes, 1) | {axis: 2}
    assert found.spec.resources.trainer.devices == 8


@pytest.mark.parametrize(
    ("values", "tower"),
    [
        ({}, "trained"),
        ({"actor_rollout_ref.actor.freeze_vision_tower": True}, "frozen"),
        ({f"{MODEL}.lora_rank": 8, f"{MODEL}.exclude_modules": ".*visual.*"}, "frozen"),
        ({f"{MODEL}.lora_rank": 8}, "trained"),
    ],
)
def test_the_tower_trains_unless_it_is_frozen_or_left_out(values: dict[str, Any], tower: str) -> None:
    found = imported(**GPUS, **values)

    assert found.spec is not None and found.may_run(), found.report.render()
    assert found.spec.model.vision_tower == tower


def test_videos_are_refused_by_the_name_of_their_files() -> None:
    found = imported(**{"data.image_key": "images", "data.train_files": "~/data/video-r1/train.parquet"})

    assert not found.may_run() and any("videos" in each for each in found.report.problems)


def test_a_critic_sees_images_too() -> None:
    found = imported(**GPUS, **{"algorithm.adv_estimator": "gae"})

    assert found.spec is not None and found.may_run(), found.report.render()
    assert found.spec.algorithm.needs_critic
