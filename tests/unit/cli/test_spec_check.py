"""``flotilla spec check --data`` opens what creation would open, and says of all of it what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import find_command
from flotilla.cli.command_line import build_parser
from services.gateway.preflight import checks, inspection
from services.gateway.preflight.prompts import Prompts
from shared.config.load import load_spec
from shared.errors import FlotillaError


@pytest.fixture(autouse=True)
def look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at prompts without a tokenizer, which takes seconds to load."""
    prompts = Prompts(8, 5, 9, 40, 1, "data.input_template", "Q: 0?\nA:")
    monkeypatch.setattr(inspection, "look_at_prompts", lambda *_: prompts)


def written(folder: Path, **sections: Any) -> Path:
    """Write a spec whose model, data and grader are there."""
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    (folder / "grade.py").write_text("def score(sample):\n    return 1.0\n")
    for name, count in (("train", 5), ("easy", 2), ("hard", 3)):
        rows = [{"question": f"{n}?", "answer": str(n)} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    document: dict[str, Any] = {
        "name": "trial",
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "prompt_column": "question", "label_column": "answer"},
        "evaluation": {"sets": [{"name": name, "path": f"{name}.jsonl"} for name in ("easy", "hard")]},
        "reward": {"components": [{"kind": "custom", "path": "grade.py:score"}]},
        "optimisation": {"steps": 3},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(document | sections))
    return path


async def check(path: Path, *options: str) -> int:
    arguments = build_parser().parse_args(["spec", "check", str(path), *options])
    return await find_command(arguments.function)(arguments)


async def test_rows_and_columns_of_every_source_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)

    assert await check(path, "--data") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("is valid: trial, 3 steps")
    assert lines[1:4] == [
        f"data: 5 rows of {tmp_path}/train.jsonl; columns answer, question",
        f"evaluation.sets.0 (easy): 2 rows of {tmp_path}/easy.jsonl; columns answer, question",
        f"evaluation.sets.1 (hard): 3 rows of {tmp_path}/hard.jsonl; columns answer, question",
    ]
    assert lines[4:] == [
        "prompts: 5 to 9 tokens (first 8 rows), at most 40 allowed; rendered by data.input_template",
        "prompts: 1 of them are too long: see data.overlong",
        "first prompt, as the model is given it:",
        "  | Q: 0?",
        "  | A:",
    ]


async def test_everything_that_is_missing_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    for name in ("model/config.json", "grade.py", "easy.jsonl"):
        (tmp_path / name).unlink()

    assert await check(path) == 0, "what is written is right"
    capsys.readouterr()
    assert await check(path, "--data", "--set", "data.label_column=solution") == 1

    said = capsys.readouterr().err
    assert "model.path: cannot read config.json" in said
    assert f"reward.components.0.path: there is no file {tmp_path}/grade.py" in said
    assert "'solution', which data.label_column names; columns there: answer, question" in said
    assert f"evaluation.sets.0: there is no file {tmp_path}/easy.jsonl" in said


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ("import nowhere", "importing it failed: ModuleNotFoundError at grade.py:1: No module named 'nowhere'"),
        ("def other(sample): ...", "the file has no function 'score'; it has: other"),
        ("def score(): ...", "must be callable with one argument, the sample; its signature is score()"),
    ],
)
async def test_a_grader_that_the_start_would_refuse_is_refused(
    grader: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    (tmp_path / "grade.py").write_text(grader)

    assert await check(path, "--data") == 1

    error = capsys.readouterr().err
    assert "reward.components.0: " in error
    assert said in error


@pytest.mark.parametrize(("file", "lacking"), [("model.safetensors", "weights"), ("tokenizer.json", "tokenizer")])
async def test_a_model_that_the_trainer_would_refuse_is_refused(
    file: str, lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    (tmp_path / "model" / file).unlink()

    assert await check(path, "--data") == 1

    assert f"model.path: model directory {tmp_path}/model has no" in (error := capsys.readouterr().err)
    assert lacking in error


async def test_a_secret_that_is_not_set_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grader = {"kind": "remote", "url": "https://grader.example/grade", "secret_env": "NOT_SET_HERE"}
    path = written(tmp_path, reward={"components": [grader]})

    assert await check(path, "--data") == 1

    assert "reward.components.0: the environment variable 'NOT_SET_HERE' (secret_env)" in capsys.readouterr().err


async def test_as_json_it_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, evaluation=None)
    (tmp_path / "grade.py").unlink()

    assert await check(path, "--data", "--json") == 1

    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert [entry["path"] for entry in answer["errors"]] == ["reward.components.0.path"]
    assert answer["data"] == [
        {
            "field": "data",
            "name": None,
            "place": f"{tmp_path}/train.jsonl",
            "num_rows": 5,
            "columns": ["answer", "question"],
        }
    ]


async def test_rows_beyond_the_most_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "prompt_column": "question",
        "label_column": "answer",
        "sources": [{"path": "train.jsonl"}, {"path": "hard.jsonl"}],
        "max_rows": 6,
    }
    path = written(tmp_path, evaluation=None, data=data)

    assert await check(path, "--data") == 0

    assert f"data: 6 rows of {tmp_path}/train.jsonl, {tmp_path}/hard.jsonl;" in capsys.readouterr().out


async def test_what_prepare_has_not_made_yet_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        tmp_path, prepare={"command": ["python", "make.py"], "output": "made"}, data={"path": "made/t.jsonl"}
    )

    assert await check(path, "--data") == 1

    assert "prepare has not made made yet: flotilla run does it first, as 'python make.py'" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["model/config.json", "grade.py", "train.jsonl", "easy.jsonl"])
async def test_what_creation_refuses_is_refused(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    (tmp_path / missing).unlink()

    with pytest.raises(FlotillaError) as refused:
        checks.check(load_spec(path))

    assert await check(path, "--data") == 1
    assert refused.value.detail.partition(": ")[2] in capsys.readouterr().err


async def test_weights_that_cannot_be_packed_here_are_said_where_a_trainer_could_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"bitsandbytes"}
    monkeypatch.setattr("flotilla.packages.find_spec", lambda name: None if name in missing else object())
    lora = {"rank": 4, "quantisation": {"dtype": "nf4"}}
    path = written(tmp_path, model={"path": "model", "lora": lora})

    assert await check(path) == 0
    assert await check(path, "--data") == 1
    assert "model.lora.quantisation needs bitsandbytes, which is not installed here" in capsys.readouterr().err
    missing.add("torch")
    assert await check(path, "--data") == 0
