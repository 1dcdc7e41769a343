"""Which trainer a script starts, and with which file, decides what its parameters mean: known, or refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build, look_up
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read
from flotilla.shared.errors import InvalidSpec

COMMON = (
    "data.train_files=train.parquet actor_rollout_ref.model.path=model algorithm.adv_estimator=grpo "
    "custom_reward_function.path=grade.py trainer.total_training_steps=10 actor_rollout_ref.rollout.n=4"
)
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"


def imported(
    command: str, *more: str, rows: int | None = None, text: str = "", files: Mapping[str, str] | None = None
) -> Imported:
    script = f"#!/bin/bash\n{text}\n{command} {COMMON} {' '.join(more)}\n"
    given = read("verl", script, (), {}, source="run.sh", beside=(files or {}).get)
    return build(SYSTEMS["verl"], given, rows=rows)


def test_a_value_that_is_not_known_is_no_reason_to_refuse_what_no_value_of_matters() -> None:
    more = ("trainer.default_local_dir=$(pwd -P)/out", "actor_rollout_ref.rollout.engine_kwargs.vllm.x=$(nproc)")
    found = imported("python -m verl.trainer.main_ppo", *more, "actor_rollout_ref.actor.optim.lr=$(cat lr)")

    assert {"trainer.default_local_dir", "actor_rollout_ref.rollout.engine_kwargs.vllm.x"} <= set(
        names(found, Verdict.UNSUPPORTED)
    )
    assert list(refused(found)) == ["actor_rollout_ref.actor.optim.lr"]


def field(found: Imported, path: str) -> Any:
    assert found.spec is not None, found.report.problems
    return look_up(found.spec.model_dump(mode="json"), path)


def names(found: Imported, *verdicts: Verdict) -> list[str]:
    return [entry.name for entry in found.report.entries if entry.verdict in verdicts]


def refused(found: Imported) -> dict[str, str]:
    return {entry.name: f"{entry.value}: {entry.detail}" for entry in found.report.refused}


@pytest.mark.parametrize(
    "program",
    [
        "python3 -m verl.trainer.main_ppo",
        "python3 verl/trainer/main_ppo.py",
        "python /root/verl/verl/trainer/main_ppo.py",
        "python3 -u main_ppo.py",
        "ray job submit --address=http://a:8265 -- python3 -m verl.trainer.main_ppo",
        "nohup python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer.yaml",
        "python3 -m verl.trainer.main_ppo --config-path ./config --config-name ppo_megatron_trainer",
        "python3 -m verl.trainer.main_ppo -cn ppo_trainer",
        "python3 -m recipe.transfer_queue.main_ppo --config-name=transfer_queue_ppo_trainer",
        "python3 main_ppo_split.py",
        "python3 -m verl.trainer.main_ppo --config-path=/opt/verl/verl/trainer/config --config-name=ppo_trainer",
    ],
)
def test_verls_usual_trainer_is_read_whatever_starts_it(program: str) -> None:
    found = imported(program)

    assert found.may_run(), found.report.render()
    assert field(found, "rollout.group_size") == 4
    assert "data.train_files" in names(found, Verdict.TRANSLATED)


@pytest.mark.parametrize(
    "program",
    [
        "python3 -m recipe.spin.main_spin",
        "python3 -m mine.main_ppo",
        "torchrun --nproc_per_node=8 -m mine.train",
        "python3 /root/mine/main_ppo.py",
    ],
)
def test_an_unknown_trainer_is_refused_by_name_and_its_parameters_are_read(program: str) -> None:
    found = imported(program)

    why = refused(found)["python -m"]
    assert "that this importer knows" in why and why.partition(":")[0] in program
    assert not found.may_run() and found.may_run(allow_refused=True)
    assert {"data.train_files", "actor_rollout_ref.rollout.n"} <= set(names(found, Verdict.TRANSLATED))


@pytest.mark.parametrize("command", ["python3 train.py", "bash inner.sh", "ray job submit -- ./go", "python3 -m mine"])
def test_a_script_that_starts_no_trainer_is_a_message_and_not_a_list_of_variables(command: str) -> None:
    text = f"MODEL_PATH=model\nTRAIN_FILE=train.parquet\n{command} --config x\n"

    with pytest.raises(InvalidSpec, match="no trainer of verl is started here"):
        read("verl", text, (), {}, source="run.sh")


def test_an_unknown_trainer_ends_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m recipe.spin.main_spin {COMMON}\n")
    command = ["import", "verl", str(script), "--output", str(tmp_path / "spec.yaml")]

    assert main(command) == 1
    assert "python -m = recipe.spin.main_spin" in capsys.readouterr().out
    assert main([*command, "--allow-refused"]) == 0


def test_the_training_program_is_read_beside_others() -> None:
    text = "python3 -m pip install x\npython3 data.py --local_dir d\npython3 -m verl.trainer.main_eval data.path=a"

    assert imported("python3 -m verl.trainer.main_ppo", text=text).may_run()


def test_the_recipe_dapo_brings_the_values_of_its_own_file() -> None:
    found = imported(
        "python3 -m recipe.dapo.main_dapo",
        "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 data.max_response_length=128 "
        "reward_model.overlong_buffer.penalty_factor=0.5 trainer.logger=wandb",
    )

    assert found.may_run(), found.report.render()
    assert field(found, "reward.shaping.overlong") == {"max_length": 128, "buffer": 64, "factor": 0.5, "capped": False}
    assert field(found, "tracking.trackers")[0]["project"] == "verl-dapo"


@pytest.mark.parametrize(("is_filtered", "rows", "steps"), [("True", 3072, 4), ("False", 3072, 4)])
def test_the_recipe_dapo_draws_more_prompts_than_it_trains_on(is_filtered: str, rows: int, steps: int) -> None:
    found = imported(
        "python3 -m recipe.dapo.main_dapo",
        f"data.gen_batch_size=1536 data.train_batch_size=512 algorithm.filter_groups.enable={is_filtered}",
        "trainer.total_training_steps=null trainer.total_epochs=2",
        rows=rows,
    )

    assert field(found, "optimisation.steps") == steps
    assert field(found, "reward.filter_zero_spread") is (is_filtered == "True")
    assert field(found, "asynchrony.require_batches") == (2 if is_filtered == "True" else 6)


@pytest.mark.parametrize("program", [ONE_STEP_OFF, "recipe.one_step_off_policy.main_ppo"])
def test_one_step_off_is_one_version_ahead_and_no_more(program: str) -> None:
    sizes = "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128"
    engines = "rollout.nnodes=1 rollout.n_gpus_per_node=4 actor_rollout_ref.rollout.tensor_model_parallel_size=2"

    found = imported(f"python3 -m {program}", sizes, engines)

    assert found.may_run(), found.report.render()
    asynchrony = field(found, "asynchrony")
    assert (asynchrony["require_batches"], asynchrony["trigger_parameter_sync_step"]) == (4, 1)
    assert (asynchrony["staleness_threshold"], asynchrony["max_lag"]) == (1.0, 1)
    assert asynchrony["on_weight_update"] == "drain"
    assert field(found, "algorithm.old_log_probs") == "rollout"
    assert field(found, "resources.rollouts.min") == 2


def test_one_step_off_recomputes_where_it_is_told_to() -> None:
    found = imported(f"python3 -m {ONE_STEP_OFF}", "algorithm.rollout_correction.bypass_mode=False")

    assert field(found, "algorithm.old_log_probs") == "recompute"


@pytest.mark.parametrize("first", ["defaults: [one_step_off_ppo_trainer, _self_]\n", ""])
def test_a_file_of_one_step_off_is_known_by_its_defaults_or_its_keys(first: str) -> None:
    text = first + "data: {train_files: a.parquet, train_batch_size: 256}\nrollout: {nnodes: 1, n_gpus_per_node: 4}\n"

    found = build(SYSTEMS["verl"], read("verl", text, (), {}, source="f.yaml"))

    assert found.document["asynchrony"]["max_lag"] == 1
    assert found.document["algorithm"]["old_log_probs"] == "rollout"
    assert "data.train_batch_size" not in refused(found)


MINE = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 7, temperature: 0.7}}\n"


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ("--config-name=mine", "mine"),
        ("--config-name=mine.yaml", "mine"),
        ("-cn mine", "mine"),
        ("--config-path=conf --config-name=mine", "conf/mine"),
        ("--config-path conf --config-name mine", "conf/mine"),
        ("--config-dir=conf --config-name=mine", "conf/mine"),
        ("--config-path=$PWD/conf --config-name=mine", "conf/mine"),
        ("--config-path=$(pwd)/conf --config-name=mine", "conf/mine"),
        ("--config-path=examples/conf --config-name=mine", "../../examples/conf/mine"),
    ],
)
def test_a_file_of_the_users_own_is_read(options: str, place: str) -> None:
    found = imported(f"python3 -m verl.trainer.main_ppo {options}", files={place: MINE})

    assert found.may_run(), found.report.render()
    assert field(found, "rollout.sampling.temperature") == 0.7
    assert field(found, "rollout.group_size") == 4  # the command line wins over the file
    where = {entry.name: entry.where for entry in found.report.entries}
    assert where["actor_rollout_ref.rollout.temperature"] == "file"


@pytest.mark.parametrize("options", ["--config-name=mine", "--config-path=/data/conf --config-name ppo_trainer"])
def test_a_file_that_is_not_found_is_refused_by_name(options: str) -> None:
    found = imported(f"python3 -m verl.trainer.main_ppo {options}")

    assert "give --config-dir DIR" in refused(found)["--config-name"]
    assert not found.may_run() and found.may_run(allow_refused=True)


def test_a_folder_of_the_users_own_without_a_name_is_refused() -> None:
    assert "--config-path" in refused(imported("python3 -m verl.trainer.main_ppo --config-path=/data/conf"))


def test_the_folder_of_a_file_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.yaml").write_text(MINE)
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo --config-name=mine {COMMON}\n")
    command = ["import", "verl", str(script), "--output", str(tmp_path / "spec.yaml")]

    assert main(command) == 1
    assert "--config-name = mine" in capsys.readouterr().out
    assert main([*command, "--config-dir", str(tmp_path / "elsewhere")]) == 0
    assert "actor_rollout_ref.rollout.temperature = 0.7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("trainer.experiment_name=run-$(nproc)", "trainer.experiment_name"),
        ("trainer.seed=$(nproc)", "trainer.seed"),
        ("$(nproc)", "$(nproc)"),
        ("--multirun", "--multirun"),
        ("stray", "stray"),
    ],
)
def test_a_word_that_cannot_be_read_is_refused_by_name_and_the_others_are_read(word: str, name: str) -> None:
    found = imported("python3 -m verl.trainer.main_ppo", word)

    assert list(refused(found)) == [name]
    assert field(found, "rollout.group_size") == 4


def test_what_is_not_known_before_the_program_does_not_matter() -> None:
    text = "if [ -d /opt/uv ]; then\n  LAUNCH=(uv run python3)\nelse\n  LAUNCH=(python3)\nfi"

    assert imported('"${LAUNCH[@]}" -m verl.trainer.main_ppo', text=text).may_run()


def test_variables_that_a_script_does_not_set_are_those_of_its_environment() -> None:
    script = f"python3 -m verl.trainer.main_ppo {COMMON} trainer.experiment_name=$NAME data.seed=${{SEED:-3}}\n"

    given = read("verl", script, (), {"NAME": "mine", "SEED": "5", "HOME": "/root"}, source="run.sh")

    assert {"trainer.experiment_name": "mine", "data.seed": 5}.items() <= {g.spelling: g.value for g in given}.items()


def test_the_folder_where_a_shell_stands_is_no_secret() -> None:
    script = f"D=${{D:-$PWD}}\npython3 -m verl.trainer.main_ppo {COMMON} trainer.default_local_dir=$D/kept\n"

    given = read("verl", script, (), {"PWD": "/srv/verl"}, source="run.sh")

    assert [(g.value, g.refusal) for g in given if g.spelling == "trainer.default_local_dir"] == [("./kept", None)]


def test_a_folder_that_the_script_goes_to_is_not_taken_for_the_first() -> None:
    found = imported("python3 -m verl.trainer.main_ppo", "data.val_files=$PWD/x.parquet", text="cd $(nproc)")

    assert list(refused(found)) == ["data.val_files"]
