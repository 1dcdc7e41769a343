"""A receipt holds a checkpoint to what it was trained on: one changed byte is found, and named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flotilla.cli.__main__ import main
from flotilla.cli.commands.receipt import stored_checkpoint
from flotilla.receipts import make_key, verify, write
from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, CheckpointState
from flotilla.shared.checkpoints.lineage import ROOT, follow
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples.folder import SAMPLES, SampleFolder, ended_name, step_name
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.testing.builders import a_group
from tests.unit.trainer.builders import a_spec

WEIGHTS = "model/model.safetensors"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a data directory with an experiment of two steps, its checkpoint and its receipt."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = tmp_path / "fleet" / "experiments" / "tiny-1a2b3c"
    checkpoint = directory / CHECKPOINTS / "step-00000002"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / WEIGHTS).write_bytes(bytes(range(256)))
    spec = a_spec()
    assert spec.samples is not None
    folder, lineage = SampleFolder(directory, spec.samples), ROOT
    for step in (1, 2):
        groups = [KeptGroup(a_group(2 * step + n, rewards=[1.0, 0.0]), SampleKind.TRAINED) for n in (0, 1)]
        parent, lineage = lineage, follow(lineage, step, [2 * step, 2 * step + 1])
        folder.write(SampleFile(step_name(step), groups, step, step - 1, {"parent": parent, "lineage": lineage}))
    filtered = KeptGroup(a_group(9, rewards=[1.0, 1.0]), SampleKind.FILTERED, "zero_spread")
    folder.write(SampleFile(ended_name(1, "reward", 1), [filtered], None, 1))
    state = CheckpointState(
        experiment_id=directory.name,
        step=2,
        version=2,
        lineage=lineage,
        updates=2,
        trained=[[2, 5]],
        seed=0,
        kl_coefficient=None,
        totals={},
        spec=spec.model_dump(mode="json"),
        software={"torch": "2"},
        files={WEIGHTS: 256},
    )
    (checkpoint / STATE_FILE).write_text(state.model_dump_json())
    assert main(["receipt", str(checkpoint)]) == 0
    return directory


def receipt_of(directory: Path) -> Path:
    return directory / "receipts" / "step-00000002.jsonl"


def key_of(directory: Path) -> Path:
    return directory.parents[2] / "config" / "flotilla" / "receipt.key"


def problems_of(directory: Path) -> list[str]:
    found: list[str] = []
    verify(receipt_of(directory), stored_checkpoint(directory / CHECKPOINTS / "step-00000002"), found.append)
    return found


def change_column(directory: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    path = directory / SAMPLES / step_name(2)
    table = parquet.read_table(path)
    column = table.schema.field(name)
    values = pa.array(change(table.column(name).to_pylist()), column.type)
    parquet.write_table(table.set_column(table.schema.get_field_index(name), column, values), path)


def test_what_is_as_it_was_verifies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipt", "--verify", str(receipt_of(run))]) == 0

    assert "4 groups: all is as it was" in capsys.readouterr().out
    key = key_of(run)
    assert not (run.parent.parent / "receipt.key").exists()
    assert key.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in receipt_of(run).read_text().splitlines()]
    assert [line["group_id"] for line in lines if "group_id" in line] == [2, 3, 4, 5, 9]
    assert lines[-2]["outcome"] == "filtered: zero_spread"


def test_a_changed_weight_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / CHECKPOINTS / "step-00000002" / WEIGHTS
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    assert main(["receipt", "--verify", str(receipt_of(run)), "--json"]) == 1

    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("weights: ")
    assert WEIGHTS in problem


def test_a_changed_trajectory_is_named(run: Path) -> None:
    def flip(values: list[Any]) -> list[Any]:
        return [[each + (number == 1) for each in row] for number, row in enumerate(values)]

    change_column(run, "token_ids", flip)

    assert problems_of(run) == [f"trajectory: answer 1 of group 4 of {step_name(2)}"]


def test_a_changed_grade_is_named(run: Path) -> None:
    change_column(run, "reward", lambda values: [*values[:-1], 1.0])

    assert problems_of(run) == [f"grade: answer 1 of group 5 of {step_name(2)}"]


def test_a_changed_spec_is_named(run: Path) -> None:
    path = run / CHECKPOINTS / "step-00000002" / STATE_FILE
    state = json.loads(path.read_text())
    state["spec"]["reward"]["components"][0]["correct"] = 2.0
    path.write_text(json.dumps(state))

    found = problems_of(run)

    assert [each.partition(":")[0] for each in found] == ["checkpoint", "spec", "grader"]


def test_a_changed_prompt_or_order_or_lost_file_is_named(run: Path) -> None:
    change_column(run, "prompt", lambda values: ["another", *values[1:]])
    (run / SAMPLES / ended_name(1, "reward", 1)).unlink()

    found = problems_of(run)

    assert found[0] == f"prompt: group 4 of {step_name(2)}"
    assert "ended-v00000001" in found[1]


def test_a_receipt_that_was_changed_or_signed_by_another_key_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run / "other.key"
    make_key(other)
    text = receipt_of(run).read_text()
    receipt_of(run).write_text(text.replace('"num_groups": 4', '"num_groups": 5'))
    assert problems_of(run) == ["receipt: it was changed after it was signed"]

    write(stored_checkpoint(run), receipt_of(run), other)
    assert problems_of(run) == []
    public = run / "public.pem"
    public.write_text(json.loads(text.splitlines()[0])["public_key"])
    assert main(["receipt", "--verify", str(receipt_of(run)), "--key", str(public)]) == 1
    assert "not signed by" in capsys.readouterr().out


def test_a_key_that_came_with_a_run_signs_only_where_it_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = run.parent.parent / "receipt.key"
    make_key(beside)
    own = json.loads(receipt_of(run).read_text().splitlines()[0])["public_key"]

    assert main(["receipt", str(run / CHECKPOINTS / "step-00000002")]) == 0
    assert "is not used" in " ".join(capsys.readouterr().out.split())
    assert json.loads(receipt_of(run).read_text().splitlines()[0])["public_key"] == own

    assert main(["receipt", str(run / CHECKPOINTS / "step-00000002"), "--key", str(beside)]) == 0
    assert json.loads(receipt_of(run).read_text().splitlines()[0])["public_key"] != own


def test_samples_that_are_gone_are_listed_and_not_passed_over(run: Path) -> None:
    (run / SAMPLES / step_name(1)).unlink()

    head = write(stored_checkpoint(run), receipt_of(run), key_of(run))

    assert head.missing_steps == [1]
    assert problems_of(run) == []


def test_what_is_no_receipt_is_refused(run: Path) -> None:
    receipt_of(run).write_text('{"group_id": 1}\n')

    with pytest.raises(InvalidRequest, match="no receipt"):
        problems_of(run)


def test_what_is_written_follows_no_link_of_the_folder(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "receipts").rename(tmp_path / "before")
    (run / "receipts").symlink_to(elsewhere)

    assert main(["receipt", str(run / CHECKPOINTS / "step-00000002")]) != 0

    assert list(elsewhere.iterdir()) == []


def test_a_name_that_is_written_first_cannot_be_laid_out_as_a_link(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / "receipts" / ".step-00000002.jsonl.tmp").symlink_to(precious)

    assert main(["receipt", str(run / CHECKPOINTS / "step-00000002")]) == 0

    assert precious.read_text() == "mine"
    assert problems_of(run) == []


def test_a_key_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    key = tmp_path / "receipt.key"
    monkeypatch.setattr("flotilla.receipts.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_key(key)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.undo()
    make_key(key)
    assert key.stat().st_mode & 0o777 == 0o600
    made = key.read_bytes()
    make_key(key)
    assert key.read_bytes() == made
    key.chmod(0o640)
    with pytest.raises(InvalidRequest, match="yours alone"):
        make_key(key)
    link = tmp_path / "link.key"
    link.symlink_to(key)
    with pytest.raises(InvalidRequest, match="a link"):
        make_key(link)


def test_the_check_as_json_says_who_signed_and_what_was_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["receipt", "--verify", str(receipt_of(run)), "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["public_key"].startswith("-----BEGIN PUBLIC KEY-----")
    assert told["checked"] == {"files": 2, "samples": 3, "groups": 5, "graders": ["reward.components.0"]}


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0] | {"files": ["a"]}, *lines[1:]],
        lambda lines: [lines[0] | {"graders": {"0": 1}}, *lines[1:]],
        lambda lines: [lines[0] | {"public_key": 7}, *lines[1:]],
        lambda lines: [7, *lines[1:]],
        lambda lines: [lines[0], [], *lines[2:]],
        lambda lines: [lines[0], lines[1] | {"samples": None}, *lines[2:]],
        lambda lines: [*lines[:2], lines[2] | {"trajectories": 3}, *lines[3:]],
        lambda lines: [*lines[:-1], {"signature": "no number"}],
        lambda lines: [*lines[:-1], {"signature": 7}],
    ],
)
def test_a_line_of_another_shape_is_refused_in_words(run: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    lines = [json.loads(line) for line in receipt_of(run).read_text().splitlines()]
    receipt_of(run).write_text("".join(json.dumps(line) + "\n" for line in change(lines)))

    with pytest.raises(InvalidRequest, match="is no receipt, or was cut"):
        problems_of(run)
