"""Rows with images, in the shapes that other systems write."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flotilla.services.gateway.datasets.loading import load_training
from flotilla.services.gateway.preflight.checks import train_dataset
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.task import Message, Task
from tests.vision_models import a_picture

RED, BLUE = a_picture("red"), a_picture("blue")


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def config(path: Path, **images: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "shuffle": False, "images": images})


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first_task(path: Path, **images: Any) -> Task:
    return load_training(config(path, **images), seed=0).task(0, group_size=2)


def test_rows_as_verl_writes_geometry3k_become_tasks(tmp_path: Path) -> None:
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Then answer in \\boxed{}."}],
        "images": [{"bytes": RED, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    data = DataConfig.model_validate({"path": str(tmp_path / "train.parquet"), "format": "verl", "images": {}})

    task = load_training(data, seed=0).task(0, group_size=2)

    assert task.images == (RED,)
    assert task.messages == (Message("user", "<image>Find x. Then answer in \\boxed{}."),)
    assert (task.label, task.data_source) == ("3", "hiyouga/geometry3k")
    assert "images" not in task.metadata


def test_parts_of_openai_messages_become_marks(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": uri(RED)}},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": uri(BLUE)}},
    ]
    path = written(tmp_path, {"prompt": [{"role": "user", "content": parts}], "label": "a"})

    task = first_task(path)

    assert task.messages == (Message("user", "Compare <image> with <image>"),)
    assert task.images == (RED, BLUE)


def test_parts_without_content_take_the_columns_images(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    path = written(tmp_path, {"prompt": [{"role": "user", "content": parts}], "label": "a", "images": [uri(RED)]})

    task = first_task(path)

    assert (task.messages[0].content, task.images) == ("<image>?", (RED,))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "url": "http://elsewhere/b.png"},
        {"type": "image", "path": "b.png"},
        {"type": "image", "image": {"bytes": None, "path": "b.png"}},
    ],
)
def test_a_part_that_names_another_image_does_not_take_the_columns(tmp_path: Path, part: dict[str, Any]) -> None:
    path = written(tmp_path, {"prompt": [{"role": "user", "content": [part]}], "label": "a", "images": [uri(RED)]})

    with pytest.raises(DataError, match=r"b\.png' has no bytes here"):
        first_task(path)


def test_bytes_of_a_part_are_its_image(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": {"bytes": BLUE, "path": None}}]}]}
    parquet.write_table(pa.Table.from_pylist([{**row, "label": "a"}]), tmp_path / "rows.parquet")

    assert first_task(tmp_path / "rows.parquet").images == (BLUE,)


def test_images_without_marks_come_before_the_first_user_message(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "what?", "label": "a", "image": uri(RED)})

    task = first_task(path, column="image")

    assert (task.messages[0].content, task.images) == ("<image>what?", (RED,))


def test_a_path_is_of_the_rows_own_folder(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(RED)
    path = written(tmp_path, {"prompt": "<image>?", "label": "a", "images": ["pictures/1.png"]})

    assert first_task(path).images == (RED,)
    assert first_task(path, folder=str(tmp_path)).images == (RED,)


def test_rows_without_images_stay_text(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1 + 1?", "label": "2"})

    assert first_task(path).images == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image>?", "images": ["../secret.png"]}, "not in"),
        ({"prompt": "<image>?", "images": ["/etc/passwd"]}, "not in"),
        ({"prompt": "<image>?", "images": ["missing.png"]}, "cannot be read"),
        ({"prompt": "<image>?", "images": ["http://169.254.169.254/a.png"]}, "none is fetched"),
        ({"prompt": "<image>?", "images": [uri(b"no picture")]}, "no image"),
        ({"prompt": "<image>?", "images": ["data:text/html;base64,AAAA"]}, "data:image"),
        ({"prompt": "<image><image>?", "images": [uri(RED)]}, "2 places"),
        ({"prompt": "<image>?"}, "1 places"),
        ({"prompt": "<image>?", "images": [3]}, "is int"),
        ({"prompt": "<image>" * 3, "images": [uri(RED)] * 3}, "max_per_prompt"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
            "none is fetched",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}]}
                ]
            },
            "none is fetched",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "more parts"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_row(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    (tmp_path.parent / "secret.png").write_bytes(RED)
    path = written(tmp_path, {"label": "a", **row})

    with pytest.raises(DataError, match=words) as raised:
        first_task(path, max_per_prompt=2)

    assert "row 0" in raised.value.detail


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret.png").write_bytes(RED)
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    path = written(data, {"prompt": "<image>?", "label": "a", "images": ["link.png"]})

    with pytest.raises(DataError, match="not in"):
        first_task(path)


def test_a_mark_is_text_where_data_has_no_images(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "<image>?", "label": "a"})

    task = load_training(DataConfig.model_validate({"path": str(path)}), seed=0).task(0, group_size=2)

    assert (task.messages[0].content, task.images) == ("<image>?", ())


def test_a_task_carries_a_picture_that_comes_twice_once() -> None:
    task = Task(0, 0, (Message("user", "<image><image><image>"),), 2, 1, images=(RED, BLUE, RED))

    wire = task.to_wire()

    assert wire["images"] == [RED, BLUE]
    assert Task.from_wire(wire) == task
    assert "images" not in Task(0, 0, (Message("user", "a"),), 2, 1).to_wire()


def taught_by_text(folder: Path, rows: Path, *sources: str) -> ExperimentSpec:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    teachers = (
        {"teachers": [{"path": str(folder), "data_sources": list(sources)}]} if sources else {"path": str(folder)}
    )
    return validate_spec(
        {
            "name": "pictures",
            "model": {"path": "/models/vl"},
            "data": {"path": str(rows), "label_column": None, "data_source_column": "from", "images": {}},
            "rollout": {"group_size": 1},
            "algorithm": {"distillation": teachers | {"pure": True}},
            "optimisation": {"steps": 3},
        }
    )


@pytest.mark.parametrize(("sources", "name"), [((), "path"), (("geometry", "sums"), r"teachers\.0\.path")])
def test_a_row_with_images_whose_teacher_takes_none_is_refused_by_its_number(
    tmp_path: Path, sources: tuple[str, ...], name: str
) -> None:
    bare = {"prompt": "1 + 1", "from": "sums"}
    shown = {"prompt": "<image>", "images": [uri(RED)], "from": "geometry"}
    (tmp_path / "bare").mkdir()
    train_dataset(taught_by_text(tmp_path, written(tmp_path / "bare", bare), *sources))

    with pytest.raises(DataError, match=rf"distillation\.{name}: row 1 of data has images, and this model takes none"):
        train_dataset(taught_by_text(tmp_path, written(tmp_path, bare, shown), *sources))
