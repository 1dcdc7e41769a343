"""ROLL's pipeline for vision-language models reads verl's rows with images; a text pipeline reads none of them."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.reward.verifiers.custom_process import grade_of, load_function
from flotilla.shared.schemas.grading import GradingSample
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


def test_devices_beside_images_may_divide_layers() -> None:
    split = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"
    devices = {
        "actor_train.device_mapping": "list(range(0,8))",
        "actor_train.training_args.gradient_accumulation_steps": 8,
        split: 2,
    }

    made = import_flat("roll", {**PICTURED, **devices})

    assert made.spec is not None and made.spec.resources.trainer.devices == 8
    assert made.spec.parallelism.tensor_parallel == 2


@pytest.mark.parametrize("model", ["OpenGVLab/InternVL3-8B", "llava-hf/llava-1.5-7b-hf"])
@pytest.mark.parametrize("system", ["roll", "verl"])
def test_models_whose_images_are_not_computed_here_are_refused_by_name(system: str, model: str) -> None:
    names = {
        "roll": {**PICTURED, "pretrain": model, f"{DATA}.image_max_pixels": 1000},
        "verl": {**BASES["verl"], "actor_rollout_ref.model.path": model, "data.image_key": "images"},
    }

    made = import_flat(system, names[system])

    assert any("images are computed here" in problem for problem in made.report.problems)


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3-VL-4B-Instruct",
        "OpenGVLab/InternVL3-8B-hf",
        "OpenGVLab/InternVL3_5-4B-HF",
    ],
)
@pytest.mark.parametrize("system", ["roll", "verl"])
def test_models_whose_images_are_computed_here_are_taken(system: str, model: str) -> None:
    names = {
        "roll": {**PICTURED, "pretrain": model, f"{DATA}.image_max_pixels": 9000},
        "verl": {**BASES["verl"], "actor_rollout_ref.model.path": model, "data.image_key": "images"},
    }

    made = import_flat(system, names[system])

    assert made.report.problems == []
    assert made.spec is not None and made.spec.data.images is not None


def test_a_part_of_the_tower_is_not_frozen_by_itself() -> None:
    made = import_flat("roll", {**PICTURED, "actor_train.model_args.freeze_module_prefix": "vision_model.blocks"})

    assert [entry.name for entry in made.report.refused] == ["actor_train.model_args.freeze_module_prefix"]


def test_held_out_images_of_another_size_are_refused() -> None:
    more = {"validation.data_args.file_name": "heldout.parquet", "validation.data_args.image_max_pixels": 5000}

    made = import_flat("roll", {**PICTURED, **more})

    assert [entry.name for entry in made.report.refused] == ["validation.data_args.image_max_pixels"]


BOXES = {
    "rewards.boxes.worker_cls": "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker",
    "rewards.boxes.tag_included": ["coco"],
}


def test_boxes_are_graded_by_rolls_own_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Verifier:
        def __init__(self, **given: Any) -> None:
            asked.append(given)

        def verify_format(self, response: str) -> float:
            return 1.0

        def verify_accuracy(self, response: str, truth: str) -> dict[str, float]:
            return {"final_score": 0.5 if truth == "[]" else 0.0}

    module = types.ModuleType("roll.pipeline.rlvr.rewards.detection_reward_worker")
    vars(module)["DetectionVerifier"] = Verifier
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = import_flat("roll", {**PICTURED, "pretrain": "Qwen/Qwen3-VL-4B-Instruct", **BOXES})
    (tmp_path / "roll_boxes.py").write_text(made.files["roll_boxes.py"])
    column = {"ground_truth": "[]", "verifier_parm": {"det_reward_ratio": {"map": 1.0}}, "format_ratio": 0.25}
    sample = GradingSample(id="1/0", prompt="p", response="r", metadata={"reward_model": column})

    grade = grade_of(load_function(f"{tmp_path}/roll_boxes.py:score")(sample))

    assert made.report.refused == []
    assert grade.reward == pytest.approx((0.5 * 1.0 + 1.0 * 0.25) / 1.25)
    assert asked[0]["det_reward_ratio"] == {"map": 1.0}


def test_boxes_in_pixels_of_the_image_are_refused_and_so_is_another_threshold() -> None:
    pixels = import_flat("roll", {**PICTURED, **BOXES})
    named = {"pretrain": "Qwen/Qwen3-VL-4B-Instruct", "system_envs.DET_IOU_THRESHOLD": "dynamic"}
    threshold = import_flat("roll", {**PICTURED, **BOXES, **named})

    assert [entry.name for entry in pixels.report.refused] == ["rewards.boxes.worker_cls"]
    assert [entry.name for entry in threshold.report.refused] == ["system_envs.DET_IOU_THRESHOLD"]
