"""The commands: output, report and exit code."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.shared.config.load.spec_text import load_spec, validate_spec
from tests.unit.importers.sources import BASES, nested, words_of

LISTS = Path(__file__).parent / "parameters"
SPEC = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric", "weight": 2.0}]},
    "optimisation": {"steps": 3},
}


def verl_file(folder: Path, **values: Any) -> str:
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(nested({**BASES["verl"], **values})))
    return str(path)


def test_an_import_writes_the_spec_and_the_file_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "spec.yaml"

    code = main(["import", "verl", verl_file(tmp_path), "algorithm.adv_estimator=rloo", "--output", str(output)])

    assert code == 0
    assert load_spec(output).algorithm.advantage.kind == "rloo"
    assert (tmp_path / "grade_compute_score_adapter.py").is_file()
    assert "import from verl:" in capsys.readouterr().out


def test_without_an_output_the_spec_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["import", "openrlhf", "--", *words_of(BASES["openrlhf"])])

    printed = capsys.readouterr()
    assert code == 0
    assert validate_spec(yaml.safe_load(printed.out)).rollout.group_size == 4
    assert "import from openrlhf:" in printed.err


def test_a_spec_that_needs_a_file_beside_it_needs_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "verl", verl_file(tmp_path)]) == 1

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "give --output FILE" in printed.err


def test_a_refusal_fails_and_is_shown_unless_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "spec.yaml"
    command = ["import", "verl", verl_file(tmp_path, **{"data.video_key": "pictures"}), "--output", str(output)]

    assert main(command) == 1
    assert "data.video_key = pictures" in capsys.readouterr().out
    assert not output.exists()
    assert main([*command, "--allow-refused"]) == 0
    assert output.exists()


def test_a_file_that_is_there_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "spec.yaml"
    output.write_text("mine")
    command = ["import", "verl", verl_file(tmp_path), "--output", str(output)]

    assert main(command) == 1
    assert output.read_text() == "mine"
    assert "--force replaces it" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_fields_of_the_spec_can_be_set_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = verl_file(tmp_path, **{"custom_reward_function.path": None})
    sets = ["--set", "reward.components=[{kind: math}]", "--set", "rollout.group_size=6"]

    assert main(["import", "verl", file]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["reward"]["components"][0]["kind"] == "verl_default"
    assert main(["import", "verl", file, *sets]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)
    assert (spec["reward"]["components"][0]["kind"], spec["rollout"]["group_size"]) == ("math", 6)


def test_passes_over_the_data_need_the_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = verl_file(tmp_path, **{"trainer.total_training_steps": None, "trainer.total_epochs": 2})
    command = ["import", "verl", file, "--output", str(tmp_path / "spec.yaml")]

    assert main(command) == 1
    assert "--rows" in capsys.readouterr().out
    assert main([*command, "--rows", "10240"]) == 0
    assert load_spec(tmp_path / "spec.yaml").optimisation.steps == 20


def test_the_report_can_be_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["import", "verl", verl_file(tmp_path), "--json", "--output", str(tmp_path / "spec.yaml")])

    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["refused"] == 0
    assert {entry["name"] for entry in report["entries"]} == set(BASES["verl"])


@pytest.mark.parametrize("system", ["verl", "roll", "openrlhf"])
def test_a_missing_file_is_a_message(system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", system, str(tmp_path / "nowhere.sh")]) == 1

    assert "nowhere.sh: cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe")

    assert main(["import", "verl", str(tmp_path / "run.sh")]) == 1

    assert "run.sh: cannot be read: it is no text (UTF-8)" in capsys.readouterr().err


def test_a_disk_that_is_full_leaves_the_file_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, write = tmp_path / "spec.yaml", Path.write_text
    output.write_text("of before")

    def fills(path: Path, text: str, **how: str) -> int:
        write(path, text[:1], **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = verl_file(tmp_path)
    monkeypatch.setattr(Path, "write_text", fills)

    assert main(["import", "verl", file, "--output", str(output), "--force"]) == 1

    assert f"cannot write {output}: No space left on device" in capsys.readouterr().err
    assert output.read_text() == "of before"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([Path(file).name, "spec.yaml"])


def test_coverage_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "coverage", str(LISTS)]) == 0
    plain = capsys.readouterr().out
    assert main(["import", "coverage", str(LISTS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert "0 unaccounted" in plain
    assert all(set(row) == {"file", "name", "verdict", "targets", "reason"} for row in found["parameters"])


def test_coverage_of_an_unknown_name_fails(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"system": "ROLL", "parameters": [{"name": "unheard_of"}]}')

    assert main(["import", "coverage", str(tmp_path)]) == 1


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return str(path)


def test_a_valid_spec_is_said_to_be(spec_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "check", spec_file]) == 0
    assert "is valid: trial, 3 steps" in capsys.readouterr().out


def test_each_problem_of_a_spec_is_one_line_with_its_field(spec_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "check", spec_file, "--set", "optimisation.stepps=1", "--set", "seed=-1"]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["seed", "optimisation.stepps"]


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "seed: 2020-13-45", "[" * 5000, "\0", "? 2020-01-01\n: 1"])
def test_what_is_no_spec_is_a_message(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    assert main(["spec", "check", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_each_value_shows_where_it_comes_from(spec_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "optimisation.steps=5", "--set", "algorithm.advantage={kind: rloo}"]
    assert main(["spec", "show", spec_file, "--json", *overrides]) == 0

    origins = {row["path"]: (row["value"], row["origin"]) for row in json.loads(capsys.readouterr().out)}
    assert origins["name"] == ("trial", "file")
    assert origins["optimisation.steps"] == (5, "command line")
    assert origins["algorithm.advantage.kind"] == ("rloo", "command line")
    assert origins["reward.components.0.weight"] == (2.0, "file")
    assert origins["reward.components.0.tolerance"] == (0.0, "default")
    assert origins["seed"] == (0, "default")


def test_what_is_shown_is_the_resolved_spec_again(spec_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "show", spec_file]) == 0

    printed = capsys.readouterr().out
    assert validate_spec(yaml.safe_load(printed)) == load_spec(Path(spec_file))
    assert all("# default" in line or "# file" in line for line in printed.splitlines() if not line.endswith(":"))


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "schema"]) == 0
    assert "optimisation" in json.loads(capsys.readouterr().out)["properties"]


def test_parameters_may_follow_options(tmp_path: Path) -> None:
    output = tmp_path / "spec.yaml"
    words = ["import", "verl", verl_file(tmp_path), "--rows", "64", "algorithm.adv_estimator=rloo"]

    assert main([*words, "--output", str(output), "trainer.total_epochs=1"]) == 0

    assert load_spec(output).algorithm.advantage.kind == "rloo"
