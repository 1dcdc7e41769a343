"""A server's devices must divide the model's heads, which is known before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.preflight.models import check_model
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    return tmp_path


def served(model: Path, devices: int | str = "auto", **options: Any) -> ExperimentSpec:
    engine = {"kind": "sglang", "device": "cuda", "options": options}
    resources = {"rollouts": {"devices": devices}}
    return a_spec(model={"path": str(model)}, rollout={"engine": engine}, resources=resources)


def test_a_size_that_does_not_divide_the_heads_is_refused(model: Path) -> None:
    check_model(served(model))
    check_model(served(model, tp_size=2))
    with pytest.raises(InvalidSpec, match=r"rollout\.engine\.options: 3 devices do not divide the model's 4 attention"):
        check_model(served(model, tp_size=3))
    with pytest.raises(InvalidSpec, match=r"resources\.rollouts\.devices: 3 devices do not divide"):
        check_model(served(model, devices=3))


def test_stages_of_a_pipeline_divide_no_heads(model: Path) -> None:
    check_model(served(model, pp_size=3))


def test_heads_of_a_text_model_inside_another_count(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 6}}))

    check_model(served(model, tp_size=3))


@pytest.mark.parametrize(
    ("kind", "images", "is_refused"),
    [
        ("internvl", {}, True),
        ("internvl", None, False),
        ("qwen3_vl", {}, False),
    ],
)
def test_images_of_tiles_are_not_sent_to_servers(
    model: Path, kind: str, images: dict[str, Any] | None, is_refused: bool
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    spec = served(model)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"images": images})})

    if is_refused:
        with pytest.raises(InvalidSpec, match="embedded engine alone"):
            check_model(spec)
    else:
        check_model(spec)
