"""``flotilla spec check --data`` opens what creation would open, and says of all of it what is wrong."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla import spec_trial
from flotilla.cli.__main__ import find_command
from flotilla.cli.command_line import build_parser
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.preflight.prompts import Prompts
from flotilla.shared.config.load.spec_text import load_spec
from flotilla.shared.errors import FlotillaError
from tests.unit.samples.builders import a_step
from tests.unit.samples.test_dump import a_run


@pytest.fixture(autouse=True)
def look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at prompts without a tokenizer, which takes seconds to load."""
    prompts = Prompts(8, 5, 9, 40, 1, "data.input_template", "Q: 0?\nA:")
    monkeypatch.setattr(spec_trial, "look_at_prompts", lambda *_: prompts)


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
    assert lines[-1].endswith("is valid: trial, 3 steps")
    assert lines[:3] == [
        f"data: 5 rows of {tmp_path}/train.jsonl; columns answer, question",
        f"evaluation.sets.0 (easy): 2 rows of {tmp_path}/easy.jsonl; columns answer, question",
        f"evaluation.sets.1 (hard): 3 rows of {tmp_path}/hard.jsonl; columns answer, question",
    ]
    assert lines[3:9] == [
        "prompts: 5 to 9 tokens (first 8 rows), at most 40 allowed; rendered by data.input_template",
        "prompts: 1 of them are too long: see data.overlong",
        "first prompt, as the model is given it:",
        "  | Q: 0?",
        "  | A:",
        "reward.components.0 (custom): rewards on 8 rows: a made-up answer 1, the label as answer 1, an empty answer 1",
    ]
    assert {line.split()[0] for line in lines[9:-1]} == {"memory", "batch"}, "what it takes comes after what it reads"


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
    assert "`label_column: null` in `data`" in said
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


async def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert await check(path, "--data") == 1
    found = capsys.readouterr()
    assert "is valid" not in found.out, "it is said at the end, of what is"
    return found.err


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ("return 1 / len(sample.response)", "row 0 of data, an empty answer: ZeroDivisionError at grade.py:2"),
        ("return float(sample.response)", "row 0 of data, a made-up answer: ValueError at grade.py:2"),
        ("return sample.response == sample.label", "got the bool "),
    ],
)
async def test_a_grader_that_fails_on_rows_is_refused(
    grader: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    (tmp_path / "grade.py").write_text(f"def score(sample):\n    {grader}\n")

    error = await refusal(path, capsys)

    assert f"reward.components.0: {said}" in error or (said in error and "reward.components.0: row 0" in error)


async def test_what_each_answer_is_worth_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, evaluation=None, reward={"components": [{"kind": "exact"}]})

    assert await check(path, "--data") == 0

    line = (
        "reward.components.0 (exact): rewards on 5 rows: a made-up answer 0, the label as answer 1, an empty answer 0"
    )
    assert line in capsys.readouterr().out.splitlines()


async def test_a_label_of_another_kind_is_named_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, reward={"components": [{"kind": "numeric"}]})
    rows = [{"question": "q", "answer": str(number)} for number in range(9)] + [{"question": "q", "answer": "seven"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    error = await refusal(path, capsys)

    assert "reward.components.0: row 9 of data, an empty answer: the label is not a number: 'seven'" in error


def a_closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_every_url_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = [a_closed_port() for _ in range(3)]
    urls = [{"url": f"http://127.0.0.1:{port}/grade"} for port in ports[:2]]
    judge = {"kind": "judge", "url": f"http://127.0.0.1:{ports[2]}/v1", "model": "m", "allow_private": True}
    components = [{"kind": "remote", "urls": urls, "allow_private": True}, judge]
    path = written(tmp_path, reward={"components": components})

    lines = (await refusal(path, capsys)).splitlines()

    places = ["reward.components.0.urls.0", "reward.components.0.urls.1", "reward.components.1"]
    for place, port in zip(places, ports, strict=True):
        (line,) = [each for each in lines if each.startswith(f"{place}: ")]
        assert "ConnectError" in line and f"127.0.0.1:{port}" in line


ENVIRONMENT = """
class Maze:
    def reset(self, seed):
        return f"a wall {seed}", {}
    def step(self, text):
        BODY
"""


def environments(folder: Path, body: str) -> Path:
    (folder / "maze.py").write_text(ENVIRONMENT.replace("BODY", body))
    return written(
        folder,
        evaluation=None,
        rollout={"episodes": {"kind": "environment", "environments": [{"environment": "maze.py:Maze"}]}},
        reward={"components": [{"kind": "environment"}]},
    )


async def test_an_environment_is_reset_and_stepped_and_its_observation_is_in_the_first_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    prompts = Prompts(8, 5, 9, 40, 0, "data.input_template", "Q")

    def look(_: Any, __: Any, begun: Any) -> Prompts:
        shown.extend(begun)
        return prompts

    monkeypatch.setattr(spec_trial, "look_at_prompts", look)
    path = environments(tmp_path, 'return "a door", 0.5, True, False, {}')

    assert await check(path, "--data") == 0

    assert shown[0][0].content.startswith("0?\n\na wall ")
    told = (
        "rollout.episodes.environments.0 (MAZE): a made-up action is answered by 'a door' with the reward 0.5 and ends"
    )
    assert told.replace("MAZE", f"{tmp_path}/maze.py:Maze") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('raise KeyError("x")', "Maze: KeyError"),
        ('return "a door"', "step must return observation, reward"),
        ('return "a door", "1", True, False, {}', "got the string '1'"),
    ],
)
async def test_an_environment_whose_step_fails_is_refused(
    body: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = await refusal(environments(tmp_path, body), capsys)

    assert "rollout.episodes.environments.0: " in error
    assert said in error


async def test_prompts_that_leave_no_room_for_the_answer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Prompts(8, 5, 900, 1024, 0, "data.input_template", "Q", 1024)
    monkeypatch.setattr(spec_trial, "look_at_prompts", lambda *_: prompts)
    path = written(tmp_path, rollout={"sampling": {"max_new_tokens": 500}, "engine": {"context_tokens": 2048}})

    error = await refusal(path, capsys)

    assert "rollout.engine.context_tokens: a prompt of 900 tokens and 500 new ones" in error


async def test_groups_of_a_dump_are_counted_and_neither_asked_nor_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", a_step(1), a_step(2, num_groups=3))
    path = written(tmp_path, data={"dump": "run", "prompt_column": "question", "label_column": "answer"})

    assert await check(path, "--data") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"data: 5 rows of {run}; columns file, group"
    graded = [line for line in lines if line.startswith("reward.components.0 (custom): ")]
    assert len(graded) == 1 and graded[0].startswith("reward.components.0 (custom): rewards on 5 rows:"), (
        "those of the evaluation"
    )
