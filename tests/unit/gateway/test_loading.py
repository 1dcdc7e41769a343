"""What a spec's data and evaluation name, loaded: sources, columns, formats, custom classes."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from pydantic import ValidationError

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.loading import load_evaluation, load_training
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.evaluation import EvaluationConfig
from flotilla.shared.errors import DataError, FlotillaError, InvalidSpec, Unavailable
from flotilla.shared.schemas.task import Message

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many are {n} and {n}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"split": "train", "index": n, "answer": f"{n}+{n}=#### {2 * n}"},
    }
    for n in range(6)
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{n}", "label": str(n)} for n in range(count)]


def load(seed: int = 0, **data: Any) -> Dataset:
    return load_training(DataConfig.model_validate(data), seed=seed)


def prompts(dataset: Dataset, count: int) -> list[str]:
    return [dataset.task(group_id, group_size=1).messages[-1].content for group_id in range(count)]


def test_rows_of_verl_work_as_they_are(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(VERL), tmp_path / "train.parquet")

    dataset = load(path=str(tmp_path / "train.parquet"), format="verl", shuffle=False)

    task = dataset.task(3, group_size=2)
    assert task.messages == (Message("user", "How many are 3 and 3?"),)
    assert (task.label, task.data_source) == ("6", "openai/gsm8k")
    assert task.metadata["extra_info"] == VERL[3]["extra_info"]
    assert (task.metadata["ability"], task.metadata["reward_model"]["style"]) == ("math", "rule")


def test_the_format_only_names_columns(tmp_path: Path) -> None:
    path = str(lines(tmp_path / "train.jsonl", VERL))
    by_hand = {"label_column": "reward_model.ground_truth", "data_source_column": "data_source"}

    assert load(path=path, **by_hand).task(0, group_size=1) == load(path=path, format="verl").task(0, group_size=1)


def test_a_dot_reaches_into_json_text_and_a_column_with_a_dot_comes_first(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "p", "a": '{"b": 5}', "c.d": "whole", "c": {"d": "inner"}}])

    assert load(path=str(path), label_column="a.b").task(0, group_size=1).label == "5"
    assert load(path=str(path), label_column="c.d").task(0, group_size=1).label == "whole"


def test_a_chat_may_be_written_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,label\n"[{""role"": ""user"", ""content"": ""hi""}]",1\n[{not a chat,2\n')

    dataset = load(path=str(tmp_path / "a.csv"), shuffle=False)

    assert prompts(dataset, 2) == ["hi", "[{not a chat"]


def test_sources_without_weights_are_one_set_of_rows(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", rows("a", 3))
    lines(tmp_path / "b.jsonl", rows("b", 2))
    sources = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")}]

    assert prompts(load(sources=sources, shuffle=False), 6) == ["a0", "a1", "a2", "b0", "b1", "a0"]
    assert prompts(load(sources=sources, shuffle=False, max_rows=4), 4) == ["a0", "a1", "a2", "b0"]
    assert sorted(prompts(load(sources=sources), 5)) == ["a0", "a1", "a2", "b0", "b1"]


def test_a_source_may_be_several_files_and_takes_its_data_sources_from_any(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", [{"prompt": "one", "tag": "x"}, {"prompt": "two", "tag": "y"}])
    second = lines(tmp_path / "b.jsonl", [{"prompt": "three", "tag": "z"}])
    source = {"path": str(first), "more_paths": [str(second)], "only_data_sources": ["y", "z"]}

    dataset = load(sources=[source], label_column=None, data_source_column="tag", shuffle=False)

    assert prompts(dataset, 2) == ["two", "three"]
    with pytest.raises(ValidationError, match="only beside path"):
        load(sources=[{"hub": "owner/name", "more_paths": [str(second)]}])


def test_weights_mix_and_each_source_goes_through_its_own_rows(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", rows("a", 6))
    lines(tmp_path / "b.jsonl", rows("b", 2))
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 3},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1},
    ]

    dataset = load(seed=5, sources=sources)

    issued = prompts(dataset, 64)
    assert sum(prompt.startswith("a") for prompt in issued) == 48
    own = [prompt for prompt in issued if prompt.startswith("a")]
    assert all(sorted(own[n : n + 6]) == [f"a{k}" for k in range(6)] for n in range(0, 48, 6)), "epochs of its own"
    assert len({tuple(own[n : n + 6]) for n in range(0, 48, 6)}) > 1
    assert prompts(load(seed=5, sources=sources), 64) == issued, "a restarted gateway issues the same"
    assert prompts(load(seed=6, sources=sources), 64) != issued


def test_a_folder_a_pattern_and_a_split(tmp_path: Path) -> None:
    lines(tmp_path / "set" / "train-00000.jsonl", rows("a", 1))
    lines(tmp_path / "set" / "train-00001.jsonl", rows("b", 1))
    lines(tmp_path / "set" / "test.jsonl", rows("t", 1))

    assert prompts(load(path=str(tmp_path / "set"), shuffle=False), 2) == ["a0", "b0"]
    assert prompts(load(path=str(tmp_path / "set" / "train-*.jsonl"), shuffle=False), 2) == ["a0", "b0"]
    assert prompts(load(sources=[{"path": str(tmp_path / "set"), "split": "test"}]), 1) == ["t0"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_folder_as_datasets_saves_it(tmp_path: Path, is_stream: bool) -> None:
    table = pa.Table.from_pylist(rows("a", 2))
    (tmp_path / "saved" / "train").mkdir(parents=True)
    make = ipc.new_stream if is_stream else ipc.new_file
    with make(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "saved" / "train" / "state.json").write_text("{}")

    assert prompts(load(path=str(tmp_path / "saved" / "train"), shuffle=False), 2) == ["a0", "a1"]


def test_urls_are_read_through_fsspec() -> None:
    with fsspec.open("memory://bucket/set/train.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows("m", 2)))
    with fsspec.open("memory://bucket/set/test.parquet", "wb") as file:
        parquet.write_table(pa.Table.from_pylist(rows("t", 1)), file)

    assert prompts(load(path="memory://bucket/set/train.jsonl", shuffle=False), 2) == ["m0", "m1"]
    assert prompts(load(path="memory://bucket/set", shuffle=False), 2) == ["m0", "m1"]
    assert prompts(load(path="memory://bucket/set/*.jsonl", shuffle=False), 2) == ["m0", "m1"]
    assert prompts(load(sources=[{"path": "memory://bucket/set", "split": "test"}]), 1) == ["t0"]


def test_a_network_that_comes_back_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flotilla.services.gateway.datasets import locations as places

    monkeypatch.setattr(places, "PAUSES_SECONDS", (0.0, 0.0))
    tries: list[int] = []

    def fetch() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionResetError("lost")
        return "found"

    assert places._reached("s3://bucket/x", fetch) == "found"
    tries.clear()
    monkeypatch.setattr(places, "PAUSES_SECONDS", ())
    with pytest.raises(Unavailable, match="cannot read s3://bucket/x: ConnectionResetError: lost"):
        places._reached("s3://bucket/x", fetch)


def test_a_source_with_other_columns_and_one_data_source_for_all(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"question": "q", "answer": "1", "level": 2}])
    lines(tmp_path / "b.jsonl", [{"prompt": "p", "label": "2", "source": "own"}])
    sources = [
        {
            "path": str(tmp_path / "a.jsonl"),
            "columns": {"prompt": "question", "label": "answer"},
            "data_source": "gsm8k",
        },
        {"path": str(tmp_path / "b.jsonl")},
    ]

    dataset = load(sources=sources, data_source_column="source", shuffle=False)

    tasks = [dataset.task(n, group_size=1) for n in range(2)]
    assert [(task.messages[0].content, task.label, task.data_source) for task in tasks] == [
        ("q", "1", "gsm8k"),
        ("p", "2", "own"),
    ]
    assert [task.metadata for task in tasks] == [{"level": 2}, {}]


def test_rows_of_chosen_data_sources_only(tmp_path: Path) -> None:
    tagged = [{"prompt": f"p{n}", "label": "1", "tag": "even" if n % 2 == 0 else "odd"} for n in range(6)]
    path = str(lines(tmp_path / "a.jsonl", tagged))
    source = {"path": path, "only_data_sources": ["odd"], "max_rows": 2}

    assert prompts(load(sources=[source], data_source_column="tag", shuffle=False), 2) == ["p1", "p3"]
    with pytest.raises(DataError, match=r"no row of 'prime'; data sources there: even, odd"):
        load(sources=[{"path": path, "only_data_sources": ["odd", "prime"]}], data_source_column="tag")


CUSTOM = """
class Rows:
    def __init__(self, count, word="w"):
        self.count, self.word = count, word

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.word == "broken":
            raise KeyError("colour")
        return {"prompt": f"{self.word}{index}", "label": str(index)} if self.word != "text" else "text"


class Endless:
    def __getitem__(self, index):
        return {}
"""


def test_a_class_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(CUSTOM)
    custom = f"{tmp_path / 'rows.py'}:Rows"

    assert prompts(load(sources=[{"custom": custom, "options": {"count": 3}}], shuffle=False), 3) == ["w0", "w1", "w2"]
    options = {"count": 9, "word": "v"}
    assert len(load(sources=[{"custom": custom, "options": options, "max_rows": 2}]).rows) == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Rows", {}, "options do not fit its constructor: missing a required argument: 'count'"),
        ("Rows", {"count": 1, "word": "broken"}, "KeyError at rows.py:11: 'colour'"),
        ("Rows", {"count": 1, "word": "text"}, "row 0 of custom dataset"),
        ("Rows", {"count": 0}, "has no rows"),
        ("Row", {}, "the file has no class 'Row'; it has: Endless, Rows"),
        ("Endless", {}, "it has no __len__"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "rows.py").write_text(CUSTOM)

    with pytest.raises(FlotillaError) as error:
        load(sources=[{"custom": f"{tmp_path / 'rows.py'}:{name}", "options": options}])

    assert isinstance(error.value, DataError | InvalidSpec)
    assert message in error.value.detail


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "/nowhere/x"}, "there is no file or folder /nowhere/x"),
        ({"path": "/nowhere/*.jsonl"}, "no file matches /nowhere/*.jsonl"),
        ({"path": "/nowhere/***.jsonl"}, "the pattern /nowhere/***.jsonl cannot be used"),
        ({"path": "memory://nowhere/x.jsonl"}, "there is nothing at memory://nowhere/x.jsonl"),
        ({"path": "unheard-of://x/y.jsonl"}, "Protocol not known: unheard-of"),
        ({"path": "HERE/a.jsonl", "label_column": "label.truth"}, "no column 'label.truth', which data.label_column"),
        ({"path": "HERE/a.jsonl", "input_template": "{}", "prompt_column": "chat"}, "data.input_template takes text"),
        (
            {"sources": [{"path": "HERE/a.jsonl", "columns": {"label": "truth"}}]},
            "no column 'truth', which data.sources.0.columns.label names; columns there: chat, label, prompt",
        ),
        ({"sources": [{"path": "HERE/a.jsonl"}, {"path": "/nowhere/x"}]}, "data.sources.1: there is no file or folder"),
        (
            {"path": "HERE/a.jsonl", "prompt_column": "label"},
            "a.jsonl: the prompt of row 0, in column 'label', must be",
        ),
        ({"path": "HERE/*"}, "end it in .jsonl"),
    ],
)
def test_what_is_wrong_is_said_with_what_is_there(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    row = {"prompt": "p", "label": {"b": 1}, "chat": [{"role": "user", "content": "x"}]}
    lines(tmp_path / "a.jsonl", [row])
    written = json.loads(json.dumps(data).replace("HERE", str(tmp_path)))

    with pytest.raises(DataError) as error:
        load(**written)

    assert message in error.value.detail


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.jsonl", '{"prompt": "p"}\n{"prompt": ', "line 2, column 12: Expecting value"),
        ("a.jsonl", '{"prompt": ' + "[" * 100_000, "nested too deep"),
        ("a.jsonl", '{"prompt": null}', "the prompt of row 0, in column 'prompt', must be text or a list of {role, "),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', "item 0 is no message: {'role': 'user'}"),
        ("a.jsonl", '{"prompt": []}', "is an empty list"),
        ("a.csv", "prompt,label\np,1\np,1,2\n", "row 1, line 3: 3 cells, 2 columns"),
        ("a.csv", 'prompt,label\n"p,1\nq,2\n', "line 3: unexpected end of data"),
        ("a.csv", "prompt,prompt\np,1\n", "two columns are called 'prompt'"),
    ],
)
def test_what_cannot_be_read_is_said_with_file_and_place(tmp_path: Path, name: str, written: str, message: str) -> None:
    (tmp_path / name).write_text(written)

    with pytest.raises(DataError) as error:
        load(path=str(tmp_path / name), label_column=None)

    assert message in error.value.detail and str(tmp_path / name) in error.value.detail


def test_held_out_sets_take_all_that_a_source_takes(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "test.jsonl", rows("a", 3))
    lines(tmp_path / "b.jsonl", [{"prompt": "q", "answer": "1"}])
    evaluation = EvaluationConfig.model_validate(
        {
            "sets": [
                {"name": "first", "path": str(tmp_path / "a"), "split": "test", "max_rows": 2},
                {"name": "second", "path": str(tmp_path / "b.jsonl"), "columns": {"label": "answer"}},
            ]
        }
    )

    dataset = load_evaluation(evaluation, DataConfig(path="unused"), seed=0)

    assert [(part.name, part.start, part.num_rows) for part in dataset.parts] == [("first", 0, 2), ("second", 2, 1)]
    assert dataset.task(2, row=2, group_size=1).label == "1"


def test_an_input_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", [{"prompt": "Sort.", "input": "2 1", "label": "1"}, *rows("a", 1)])

    assert prompts(load(path=str(file), input_column="input", shuffle=False), 1) == ["Sort.\n2 1"]
    with pytest.raises(DataError, match="no row has a column 'inputs'"):
        load(path=str(file), input_column="inputs")
