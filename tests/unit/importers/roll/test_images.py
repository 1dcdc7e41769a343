"""ROLL's pipeline for vision-language models reads verl's rows with images; a text pipeline reads none of them."""

from typing import Any

import pytest

from flotilla.importers.parameter import Verdict
from tests.unit.importers.sources import BASES, import_flat

DATA = "actor_train.data_args"
PICTURED: dict[str, Any] = {
    **BASES["roll"],
    "pretrain": "Qwen/Qwen2.5-VL-7B-Instruct",
    "adv_estimator": "grpo",
    f"{DATA}.messages": "prompt",
}


def test_a_vision_model_is_shown_the_images_of_verls_rows() -> None:
    bounds = {f"{DATA}.image_max_pixels": 1_048_576, "actor_train.model_args.freeze_module_prefix": "vision_model"}

    made = import_flat("roll", {**PICTURED, **bounds})

    assert made.spec is not None, made.report.problems
    assert made.spec.data.images is not None
    assert (made.spec.data.images.max_pixels, made.spec.data.images.min_pixels) == (1_048_576, 3136)
    assert made.spec.data.format == "verl"
    assert made.spec.model.vision_tower == "frozen"
    assert made.spec.optimisation.freeze == ()


def test_the_program_says_whether_a_vision_models_rows_have_images() -> None:
    text = import_flat("roll", {**PICTURED, "python": "start_rlvr_pipeline.py"})
    pictured = import_flat("roll", {**PICTURED, "pretrain": "m", "python": "start_rlvr_vl_pipeline.py"})

    assert text.document["data"].get("images") is None
    assert pictured.document["data"]["images"]["column"] == "images"


def test_devices_beside_images_are_unsupported_since_one_rank_trains() -> None:
    devices = {
        "actor_train.device_mapping": "list(range(0,8))",
        "actor_train.training_args.gradient_accumulation_steps": 8,
    }

    made = import_flat("roll", {**PICTURED, **devices})

    assert {e.name: e.verdict for e in made.report.entries}["actor_train.device_mapping"] is Verdict.UNSUPPORTED
    assert made.spec is not None and made.spec.resources.trainer.devices == "auto"


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "OpenGVLab/InternVL3-8B", "llava-hf/llava-1.5-7b-hf"])
@pytest.mark.parametrize("system", ["roll", "verl"])
def test_models_whose_images_are_not_computed_here_are_refused_by_name(system: str, model: str) -> None:
    names = {
        "roll": {**PICTURED, "pretrain": model, f"{DATA}.image_max_pixels": 1000},
        "verl": {**BASES["verl"], "actor_rollout_ref.model.path": model, "data.image_key": "images"},
    }

    made = import_flat(system, names[system])

    assert any("images are computed here" in problem for problem in made.report.problems)


def test_a_part_of_the_tower_is_not_frozen_by_itself() -> None:
    made = import_flat("roll", {**PICTURED, "actor_train.model_args.freeze_module_prefix": "vision_model.blocks"})

    assert [entry.name for entry in made.report.refused] == ["actor_train.model_args.freeze_module_prefix"]


def test_held_out_images_of_another_size_are_refused() -> None:
    more = {"validation.data_args.file_name": "heldout.parquet", "validation.data_args.image_max_pixels": 5000}

    made = import_flat("roll", {**PICTURED, **more})

    assert [entry.name for entry in made.report.refused] == ["validation.data_args.image_max_pixels"]
