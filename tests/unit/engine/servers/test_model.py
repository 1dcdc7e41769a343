"""What is read of a model directory, and the directories that a server's files are in."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from flotilla.services.rollout.engines.servers.model import make_place, read_served_model, stage_directory, sweep_places
from flotilla.shared.errors import ModelError, Unavailable, WeightTransferFailed
from tests.contract.engine.models import make_model, save_image, save_model


def test_a_tied_head_may_be_in_the_image_or_not(tmp_path: Path) -> None:
    model = save_model("qwen3-tied", tmp_path / "model")
    served = read_served_model(tmp_path / "model")

    served.check_fits(save_image(model, tmp_path / "without.safetensors"))
    head = torch.zeros(96, 32)
    served.check_fits(save_image(model, tmp_path / "with.safetensors", **{"lm_head.weight": head}))
    untied = make_model("qwen3")
    with pytest.raises(WeightTransferFailed, match="has shape"):
        served.check_fits(save_image(untied, tmp_path / "other.safetensors"))


def test_a_directory_that_is_no_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_served_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        read_served_model(tmp_path)


def test_a_directory_that_cannot_be_staged_now_is_no_fault_of_the_image(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")

    with pytest.raises(Unavailable, match="no directory can be made"):
        stage_directory(tmp_path / "gone", tmp_path / "model", tmp_path / "image.safetensors")


def test_a_staged_directory_holds_the_image_itself_and_the_models_configuration(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    image = save_image(make_model("qwen3", seed=1), tmp_path / "image.safetensors")

    (tmp_path / "place").mkdir()
    places = {stage_directory(tmp_path / "place", tmp_path / "model", image) for _ in range(2)}

    assert len(places) == 2
    for place in places:
        assert (place / "model.safetensors").resolve() == image.resolve()
        assert (place / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
        assert sorted(each.name for each in place.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
        ]


def test_directories_of_dead_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = tmp_path / f"flotilla-engine-{int(ended.stdout)}-abc"
    left.mkdir()
    of_another = tmp_path / f"flotilla-engine-{os.getppid()}-abc"
    of_another.mkdir()
    mine = make_place()

    assert set(sweep_places()) == {left, mine}
    assert [each.name for each in tmp_path.iterdir()] == [of_another.name]
