"""``python -m tests.launch_files``: of files that are right, half known, misread in silence, or unreadable."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.importers import systems
from tests.launch_files.files import launch_files
from tests.launch_files.outcome import Outcome
from tests.launch_files.reading import Reading
from tests.launch_files.summary import summary
from tests.launch_files.tried import Tried, tried

MAIN = "python3 -m verl.trainer.main_ppo"
COMMON = (
    "data.train_files=$HOME/train.parquet actor_rollout_ref.model.path=model algorithm.adv_estimator=grpo "
    "custom_reward_function.path=grade.py actor_rollout_ref.rollout.n=4 trainer.total_training_steps=10"
)


def script(text: str, *arguments: str, name: str = "run.sh") -> dict[str, Any]:
    usual = COMMON.replace("$HOME", "/home/u").split()
    environment = {"HOME": "/home/u", "PWD": "/src"}
    return {"id": f"verl-0.9/{name}", "text": f"{text} {COMMON}\n", "environment": environment,
            "program": "verl.trainer.main_ppo", "arguments": [*arguments, *usual]}  # fmt: skip


def tried_list(folder: Path, *items: dict[str, Any], system: str = "verl") -> list[Tried]:
    (folder / f"{system}.json").write_text(json.dumps(items))
    return list(tried(launch_files(folder)))


def test_a_script_that_is_read_as_bash_read_it_is_exact_and_translated(tmp_path: Path) -> None:
    found = tried_list(tmp_path, script(f"{MAIN} data.seed=3", "data.seed=3"))

    assert [(each.reading, each.outcome) for each in found] == [(Reading.EXACT, Outcome.TRANSLATED)]


def test_a_value_that_is_not_known_makes_a_reading_partial(tmp_path: Path) -> None:
    (found,) = tried_list(tmp_path, script(f"{MAIN} data.train_batch_size=$(nproc)", "data.train_batch_size=2"))

    assert (found.reading, found.differs) == (Reading.PARTLY, ("data.train_batch_size",))
    assert (found.outcome, found.refused) == (Outcome.REFUSED, ("data.train_batch_size",))


@pytest.mark.parametrize(
    ("told", "said"), [(("data.seed=4",), "is 4, read as 3"), ((), "is not there"),
                       (("data.seed=3", "data.shuffle=False"), "data.shuffle: is False, not read")]
)  # fmt: skip
def test_a_value_or_a_name_that_is_misread_in_silence_is_a_difference(
    tmp_path: Path, told: tuple[str, ...], said: str
) -> None:
    (found,) = tried_list(tmp_path, script(f"{MAIN} data.seed=3", *told))

    assert found.reading is Reading.DIFFERENT and said in found.differs[0]


def test_what_hydra_resolved_is_the_truth_of_yaml(tmp_path: Path) -> None:
    beside = {"below/other.yaml": "data: {seed: 3}\n"}
    item = {"id": "verl-0.9/a.yaml", "text": "defaults: [below/other@_global_, _self_]\n", "beside": beside}
    (exact,) = tried_list(tmp_path, item | {"resolved": {"data.seed": 3}})
    (other,) = tried_list(tmp_path, item | {"resolved": {"data.seed": 4}})

    assert exact.reading is Reading.EXACT
    assert other.reading is Reading.DIFFERENT
    assert exact.outcome is Outcome.TRANSLATED


def test_a_file_that_cannot_be_read_is_unread_and_failed_and_no_fault_of_the_program(tmp_path: Path) -> None:
    (found,) = tried_list(tmp_path, script("python3 -m pip install x; ( true )"))

    assert (found.reading, found.outcome, found.is_wrong) == (Reading.UNREAD, Outcome.FAILED, False)


def test_a_traceback_is_the_programs_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("flotilla.importers.build.validate_spec", broken)
    (found,) = tried_list(tmp_path, script(MAIN))

    assert found.outcome is Outcome.FAILED and found.is_wrong and "broken" in found.problems[0]


def test_plain_files_are_found_below_a_folder_with_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "run.sh").write_text(f"{MAIN} {COMMON} trainer.nothing_known=1\n")
    (tmp_path / "notes.yaml").write_text("a: 1\n")
    found = list(tried(launch_files(tmp_path)))

    assert [(each.id, each.system, each.outcome) for each in found] == [("verl/run.sh", "verl", Outcome.REFUSED)]
    assert found[0].refused == ("trainer.nothing_known",)
    assert systems.SYSTEMS.keys() >= {each.system for each in found}


def test_refusals_are_ranked_by_the_files_that_each_alone_keeps_out(tmp_path: Path) -> None:
    found = tried_list(
        tmp_path, *(script(f"{MAIN} trainer.first={number}", name=f"{number}.sh") for number in range(2)),
        *(script(f"{MAIN} trainer.first=1 trainer.second=1", name=f"both{number}.sh") for number in range(3)),
    )  # fmt: skip
    ranked = summary(found).splitlines()[-2:]

    assert ranked[0].split()[:3] == ["2", "5", "trainer.first:"]
    assert ranked[1].split()[:3] == ["0", "3", "trainer.second:"]


def test_an_empty_folder_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no launch file"):
        launch_files(tmp_path)
