"""What a spec with images may not ask for besides, and what images may not ask for."""

from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec


def a_spec(images: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **sections: Any) -> ExperimentSpec:
    return validate_spec(
        {
            "name": "pictures",
            "model": {"path": "/models/vl"},
            "data": {"path": "rows.parquet", "images": images or {}, **(data or {})},
            "reward": {"components": [{"kind": "exact"}]},
            "optimisation": {"steps": 3},
            **sections,
        }
    )


def test_images_need_no_more_than_their_section() -> None:
    spec = a_spec()

    assert spec.data.images is not None
    assert (spec.data.images.column, spec.model.vision_tower) == ("images", "frozen")


@pytest.mark.parametrize("kind", ["torch", "sglang", "vllm"])
def test_every_engine_goes_with_images(kind: str) -> None:
    assert a_spec(rollout={"engine": {"kind": kind}}).rollout.engine.kind == kind


@pytest.mark.parametrize(
    "parallelism",
    [
        {"ranks": 2},
        {"ranks": 4, "replicas": 2},
        *({"ranks": 2, f"{axis}_parallel": 2} for axis in ("tensor", "sequence", "expert")),
        {"ranks": 2, "critic": {"tensor_parallel": 2}},
    ],
)
def test_ranks_go_with_images_whatever_they_divide(parallelism: dict[str, Any]) -> None:
    spec = a_spec(parallelism=parallelism, algorithm={"advantage": {"kind": "gae"}})

    assert spec.parallelism.ranks == parallelism["ranks"]


@pytest.mark.parametrize(
    "episodes",
    [
        {"kind": "environment", "environments": [{"environment": "frozen_lake"}], "history": "branch"},
        {"kind": "environment", "environments": [{"environment": "frozen_lake", "memory": {},
         "turn_template": "{history}{observation}"}]},
    ],
)  # fmt: skip
def test_episodes_of_several_sequences_go_with_images(episodes: dict[str, Any]) -> None:
    assert a_spec(rollout={"episodes": episodes}).data.images is not None


def test_a_critic_goes_with_images() -> None:
    spec = a_spec(algorithm={"advantage": {"kind": "gae"}}, parallelism={"ranks": 4, "critic": {"replicas": 2}})

    assert spec.algorithm.needs_critic


def test_agents_go_with_images() -> None:
    assert a_spec(rollout={"agents": {}}).rollout.agents is not None


def test_a_teacher_in_the_trainer_goes_with_images() -> None:
    spec = a_spec(algorithm={"distillation": {"path": "/models/teacher"}})

    assert spec.algorithm.distillation is not None


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rollout": {"engine": {"kind": "vllm"}}, "asynchrony": {"on_weight_update": "continue"}},
            "continue and rollout.engine.kind vllm",
        ),
        (
            {
                "model": {"path": "/models/vl", "lora": {"rank": 4}},
                "rollout": {"engine": {"kind": "vllm"}},
                "asynchrony": {"publication": {"lora": "adapters"}},
            },
            "lora adapters and rollout.engine.kind vllm",
        ),
        (
            {"rollout": {"engine": {"kind": "sglang", "update_weights_from": "distributed"}}},
            "update_weights_from distributed",
        ),
        (
            {"rollout": {"engine": {"kind": "sglang", "update_weights_from": "tensor"}}},
            "update_weights_from tensor",
        ),
        (
            {"rollout": {"engine": {"kind": "sglang", "url": "http://127.0.0.1:30000"}}},
            "rollout.engine.url of kind sglang",
        ),
        (
            {"rollout": {"engine": {"kind": "vllm", "options": {"limit-mm-per-prompt": "{}"}}}},
            "it is set by data.images",
        ),
        (
            {"algorithm": {"distillation": {"servers": [{"url": "http://t.example.com", "kind": "sglang"}]}}},
            r"algorithm.distillation.servers, which are sent token ids",
        ),
        ({"images": {"min_pixels": 10, "max_pixels": 5}}, "min_pixels 10 is above"),
        ({"data": {"input_template": "Q: {}"}}, "images have no place"),
    ],
)
def test_what_does_not_go_with_images_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        a_spec(**sections)
