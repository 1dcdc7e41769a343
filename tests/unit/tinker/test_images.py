"""Images of saved models that are replaced, or cannot be written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flotilla.services.rollout.tinker import images
from flotilla.services.rollout.tinker.images import write_image
from flotilla.shared.errors import ModelError, NotFound, Unavailable
from flotilla.shared.tinker.records import MANIFEST, Saved

WHOLE = "model.safetensors"


def a_saved_model(directory: Path, step: int = 3) -> Path:
    directory.mkdir(exist_ok=True)
    saved = Saved(path="tinker://s:train:0/sampler_weights/a", owner="me", created=0.0, step=step, num_bytes=1)
    (directory / MANIFEST).write_text(saved.model_dump_json())
    save_file({"a": torch.full((2,), float(step))}, directory / WHOLE)
    return directory


def test_an_image_is_of_the_weights_whose_updates_are_told(tmp_path: Path) -> None:
    assert write_image(tmp_path, a_saved_model(tmp_path / "a"), tmp_path / "image") == 3


def without_weights(directory: Path) -> None:
    (directory / WHOLE).unlink()


def replaced(directory: Path) -> None:
    a_saved_model(directory, step=4)


@pytest.mark.parametrize("becomes", [without_weights, replaced])
def test_a_saved_model_that_is_replaced_while_it_is_read_is_not_there(
    becomes: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = a_saved_model(tmp_path / "a")
    whole = images.safe_open

    def open_late(*arguments: Any, **options: Any) -> Any:
        becomes(saved)
        return whole(*arguments, **options)

    monkeypatch.setattr(images, "safe_open", open_late)

    with pytest.raises(NotFound):
        write_image(tmp_path, saved, tmp_path / "image")


def test_a_saved_model_that_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    saved = a_saved_model(tmp_path / "a")
    (saved / WHOLE).write_bytes(b"no tensors")

    with pytest.raises(ModelError):
        write_image(tmp_path, saved, tmp_path / "image")


def test_an_image_that_cannot_be_written_is_no_fault_of_the_request(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        write_image(tmp_path, a_saved_model(tmp_path / "a"), tmp_path / "no" / "image")
