"""A shell script that starts TRL: its command, one of its own scripts, or a script of the user's with flags."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build
from flotilla.importers.composition import Beside, beside, nothing_beside
from flotilla.importers.systems import detect, read, read_launch_text, system_of
from flotilla.shared.errors import InvalidSpec

GRPO = """#!/bin/bash
MODEL=${MODEL:-owner/small}
accelerate launch --config_file ds.yaml --num_processes 4 SCRIPT --model_name_or_path $MODEL \\
    --dataset_name owner/rows --reward_funcs accuracy_reward --num_generations 8 --beta=0.02 \\
    --max_steps 100 --gradient_accumulation_steps 8 --bf16
"""
USER = """
import argparse
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, default=4)
asked = parser.parse_args()
args = GRPOConfig(num_generations=asked.group, max_steps=5, gradient_accumulation_steps=8)
GRPOTrainer(model="m", reward_funcs=lambda completions, **kw: [1.0], args=args, train_dataset=load_dataset("o/r"))
"""


def imported(text: str, *overrides: str, beside: dict[str, str] | None = None, program: int | None = None) -> Imported:
    files = {} if beside is None else beside
    given = read("trl", text, overrides, {}, source="run.sh", beside=files.get, program=program)
    return build(system_of("trl", given), given, rows=1000)


@pytest.mark.parametrize("script", ["trl/scripts/grpo.py", "/opt/trl/examples/scripts/grpo.py", "-m trl.scripts.grpo"])
def test_trls_own_script_is_read_by_its_flags(script: str) -> None:
    found = imported(GRPO.replace("SCRIPT", script))

    assert found.spec is not None, found.report.problems
    assert (found.spec.model.path, found.spec.rollout.group_size, found.spec.optimisation.steps) == (
        "owner/small",
        8,
        100,
    )
    assert found.spec.algorithm.kl is not None and found.spec.algorithm.kl.coefficient == 0.02
    assert found.report.refused == []


def test_the_command_of_trl_takes_flags_over_its_file_and_ours_over_both() -> None:
    text = "trl grpo --config conf/grpo.yaml --num_generations 8\n"
    file = "model_name_or_path: m\ndataset_name: o/r\nreward_funcs: [accuracy_reward]\nnum_generations: 2\nbeta: 0.1\n"
    file += "max_steps: 9\ngradient_accumulation_steps: 8\n"

    found = imported(text, "beta=0.5", beside={"../conf/grpo.yaml": file})

    assert found.spec is not None and found.spec.algorithm.kl is not None, found.report.problems
    assert (found.spec.rollout.group_size, found.spec.algorithm.kl.coefficient) == (8, 0.5)


def test_a_script_of_the_users_is_followed_with_the_flags_of_its_command_line() -> None:
    found = imported("torchrun --nproc_per_node 2 src/train.py --group 8\n", beside={"src/train.py": USER})

    assert found.document["rollout"]["group_size"] == 8


def test_a_variable_of_the_script_may_be_given_and_one_that_nothing_knows_is_named() -> None:
    given = imported(GRPO.replace("SCRIPT", "trl/scripts/grpo.py"), "MODEL=other")
    unknown = imported(GRPO.replace("SCRIPT", "trl/scripts/grpo.py").replace("0.02", "$(cat beta)"))

    assert given.document["model"]["path"] == "other"
    assert [entry.name for entry in unknown.report.refused] == ["beta"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trl sft --model_name_or_path m\ntrl dpo --model_name_or_path m\n", "--program N"),
        ("echo trl\n", "starts none"),
        ("python mine.py\n", "not found in the script's folder"),
        ("trl grpo " + "--beta 1 " * 3000, "4096 words at most"),
        ("trl grpo --config nowhere.yaml\n", "--config is not found"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        imported(text)


@pytest.mark.parametrize("named", ["ABSOLUTE", "../outside/private.yaml", "link.yaml", "private.yaml"])
def test_a_scripts_names_lead_to_no_file_outside_of_its_folder_and_its_repository(tmp_path: Path, named: str) -> None:
    secret = tmp_path / "outside" / "private.yaml"
    scripts = tmp_path / "project" / "scripts"
    secret.parent.mkdir()
    scripts.mkdir(parents=True)
    secret.write_text("model_name_or_path: secret\n")
    (tmp_path / "private.yaml").write_text("model_name_or_path: secret\n")
    (scripts / "link.yaml").symlink_to(secret)
    text = f"trl sft --config {named.replace('ABSOLUTE', str(secret))} --dataset_name o/r --max_steps 3\n"

    def around(first: Path | None = None) -> Beside:
        return beside(scripts, read_launch_text, first=first)

    def parameters(first: Path | None = None) -> list[Any]:
        return [each.value for each in read("trl", text, (), {}, source="run.sh", beside=around(first))]

    with pytest.raises(InvalidSpec, match="nothing outside of these is read"):
        parameters()
    (tmp_path / "project" / ".git").mkdir()
    with pytest.raises(InvalidSpec, match="nothing outside of these is read"):
        parameters()
    if named != "link.yaml":
        assert "secret" in parameters(secret.parent), "the user named this folder"


def test_what_a_script_names_lies_beside_it_or_above_it_in_its_repository(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(USER)
    (tmp_path / "base.yaml").write_text("model_name_or_path: ours\n")
    around = beside(scripts, read_launch_text)

    assert around("../train.py") == USER and around("../base") is not None
    assert around(str(tmp_path / "base.yaml")) is not None, "an absolute name of a file of the repository"
    given = read("trl", "python train.py --group 8\n", (), {}, source="run.sh", beside=around)
    assert build(system_of("trl", given), given, rows=1000).document["rollout"]["group_size"] == 8


@pytest.mark.parametrize("system", ["trl", "auto"])
def test_the_folder_that_the_message_asks_for_can_be_given(tmp_path: Path, system: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.yaml").write_text("model_name_or_path: m\ndataset_name: o/r\nmax_steps: 3\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text("trl sft --config mine.yaml\n")
    output = tmp_path / "spec.yaml"
    command = ["import", system, str(tmp_path / "scripts" / "run.sh"), "--output", str(output)]

    assert main(command) != 0 and not output.exists()
    assert main([*command, "--config-dir", str(tmp_path / "elsewhere")]) == 0 and output.exists()


def test_a_flag_of_many_words_is_all_of_them_in_their_order() -> None:
    words = [f"w{number}" for number in range(1000)]

    given = read("trl", f"trl grpo --reward_funcs {' '.join(words)}\n", (), {}, source="run.sh", beside=nothing_beside)

    [found] = [each.value for each in given if each.spelling == "reward_funcs"]
    assert [str(each) for each in found] == words


def test_one_of_several_programs_is_chosen() -> None:
    text = "trl sft --model_name_or_path m --dataset_name o/r --max_steps 3\ntrl dpo --model_name_or_path m\n"

    found: Any = imported(text, program=1).document

    assert found["job"]["kind"] == "sft"


def test_a_shell_script_of_trl_is_known_by_its_command() -> None:
    assert detect("trl grpo --model_name_or_path m\n", "run.sh") == "trl"
