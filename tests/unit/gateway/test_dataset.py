import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla.services.gateway.datasets.dataset import Dataset, order_of_epoch
from flotilla.services.gateway.datasets.loading import load_training
from flotilla.services.gateway.datasets.row_readers import read_rows
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.task import Message

ROWS = [{"prompt": f"p{n}", "label": str(n), "level": n} for n in range(5)]


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"path": "unused", **changes})


def write(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    rows = ROWS if rows is None else rows
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}")

    dataset = load_training(config(path=str(path), shuffle=False, max_rows=4), seed=0)

    assert len(dataset.rows) == 4
    task = dataset.task(2, group_size=3, min_version=7)
    assert (task.row, task.messages, task.label, task.min_version) == (2, (Message("user", "p2"),), "2", 7)
    assert task.metadata == {"level": "2" if suffix == ".csv" else 2}


def test_each_epoch_issues_every_row_once_in_an_order_of_its_own() -> None:
    dataset = Dataset(ROWS, config(), seed=3)

    epochs = [[dataset.row_of(5 * epoch + n) for n in range(5)] for epoch in range(4)]

    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert epochs == [[Dataset(ROWS, config(), seed=3).row_of(5 * e + n) for n in range(5)] for e in range(4)]
    assert [dataset.row_of(n) for n in range(5)] != [Dataset(ROWS, config(), seed=4).row_of(n) for n in range(5)]


def test_the_order_is_the_same_on_every_machine() -> None:
    # A run that is resumed elsewhere must go on in the same order: these numbers never change.
    assert order_of_epoch(0, 0, 8).tolist() == [4, 6, 2, 3, 5, 7, 0, 1]
    assert np.array_equal(np.sort(order_of_epoch(12345, 678, 1000)), np.arange(1000))


def test_without_shuffling_rows_come_as_they_stand() -> None:
    dataset = Dataset(ROWS, config(shuffle=False), seed=3)

    assert [dataset.row_of(n) for n in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_seeds_differ_between_groups_and_depend_on_the_experiments_seed() -> None:
    dataset = Dataset(ROWS, config(), seed=1)
    seeds = {dataset.task(n, group_size=1).seed for n in range(20)}

    assert len(seeds) == 20
    assert dataset.task(3, group_size=1).seed != Dataset(ROWS, config(), seed=2).task(3, group_size=1).seed


def test_chats_system_prompts_and_structured_labels() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": chat, "label": {"cases": [1]}, "source": "math", "day": date(2026, 1, 2)}]
    dataset = Dataset(rows, config(system_prompt="be short", data_source_column="source"), seed=0)

    task = dataset.task(0, group_size=1)

    assert [m.role for m in task.messages] == ["system", "user", "assistant"]
    assert (task.label, task.data_source, task.metadata) == ('{"cases": [1]}', "math", {"day": "2026-01-02"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.txt", "x", "end it in .jsonl"),
        ("data.jsonl", '{"prompt": "a"\n', "line 1"),
        ("data.jsonl", "[1]", "row 0"),
        ("data.json", '{"prompt": "a"}', "list of objects"),
        ("data.jsonl", "\n", "has no rows"),
        ("data.jsonl", '{"question": "a", "label": "b"}', "columns there: label, question"),
        ("data.jsonl", '{"prompt": "a", "label": "b"}\n{"prompt": "a"}', "row 1"),
        ("data.jsonl", '{"prompt": 3, "label": "b"}', "the prompt of row 0"),
        ("data.parquet", "no parquet", "cannot read"),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(DataError) as error:
        load_training(config(path=str(tmp_path / name)), seed=0)

    assert message in error.value.detail


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_rows(str(tmp_path / "absent.jsonl"))


def test_text_of_the_input_column_follows_the_prompt_on_a_new_line() -> None:
    rows = [{"prompt": "Sort.", "input": "2 1", "label": "1"}, {"prompt": "Wait.", "input": "", "label": "2"},
            {"prompt": "Go.", "label": "3"}]  # fmt: skip
    dataset = Dataset(rows, config(input_column="input", shuffle=False), 0)

    tasks = [dataset.task(number, group_size=1) for number in range(3)]
    assert [task.messages[-1].content for task in tasks] == ["Sort.\n2 1", "Wait.", "Go."]
    assert all("input" not in task.metadata for task in tasks)


@pytest.mark.parametrize(
    "row", [{"prompt": [{"role": "user", "content": "a"}], "input": "b"}, {"prompt": "a", "input": 3}]
)
def test_an_input_column_without_text_on_both_sides_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="both must hold text"):
        Dataset([{**row, "label": "1"}], config(input_column="input"), 0).task(0, group_size=1)
