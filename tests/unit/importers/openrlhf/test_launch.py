"""OpenRLHF's programs: the one that trains by reinforcement is read, whole; others are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build, look_up
from flotilla.importers.openrlhf.launch import read_openrlhf
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read, system_of
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, import_flat

FLAGS = "--pretrain m --prompt_data a.jsonl --apply_chat_template --remote_rm_url http://g:5000/x --max_steps 9"
PPO = "openrlhf.cli.train_ppo_ray"


def of_script(text: str, environment: dict[str, str] | None = None) -> Imported:
    return build(SYSTEMS["openrlhf"], read("openrlhf", text, (), environment or {}, source="run.sh"))


def field(found: Imported, path: str) -> Any:
    assert found.spec is not None, found.report.problems
    return look_up(found.spec.model_dump(mode="json"), path)


def refused(found: Imported) -> dict[str, str]:
    return {entry.name: f"{entry.value}: {entry.detail}" for entry in found.report.refused}


@pytest.mark.parametrize(
    "program",
    [
        f"python3 -m {PPO}",
        f"deepspeed --module {PPO}",
        "python3 openrlhf/cli/train_ppo_ray.py",
        "python /opt/openrlhf/cli/train_ppo_ray.py",
        f"ray job submit --address=http://a:8265 --runtime-env-json='{{}}' -- python3 -m {PPO}",
        f"nohup python3 -u -m {PPO}",
    ],
)
def test_the_trainer_is_read_whatever_starts_it(program: str) -> None:
    found = of_script(f"{program} {FLAGS} --n_samples_per_prompt 4 --advantage_estimator rloo\n")

    assert found.may_run(), found.report.render()
    assert field(found, "rollout.group_size") == 4


@pytest.mark.parametrize(
    "words", [["--rows", "100000", "MODEL=models/q"], ["MODEL=models/q", "--rows", "100000"]], ids=" ".join
)
def test_variables_of_a_script_are_given_on_the_command_line(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"python3 -m {PPO} {FLAGS.replace('--pretrain m', '--pretrain $MODEL')}\n")
    output = tmp_path / "spec.yaml"

    assert main(["import", "openrlhf", str(script), *words, "--output", str(output)]) == 0
    assert yaml.safe_load(output.read_text())["model"]["path"] == "models/q"


@pytest.mark.parametrize(
    ("word", "message"), [("OTHER=1", "uses no variable of this name"), ("--seed=3", "there may be NAME=VALUE")]
)
def test_what_is_no_variable_of_the_script_is_a_message(word: str, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        read("openrlhf", f"MODEL=m\npython3 -m {PPO} {FLAGS}\n", [word], {}, source="run.sh")


@pytest.mark.parametrize("value", ["openrlhf_train_ppo", "ckpt/train_ppo", "train_ppo_ray.py", PPO])
@pytest.mark.parametrize("program", ["", f"python3 -m {PPO} "])
def test_a_value_that_is_called_like_the_program_hides_no_flag_before_it(program: str, value: str) -> None:
    words = f"{program}--n_samples_per_prompt 8 {FLAGS} --save_path {value}".split()

    given = {each.spelling: each.value for each in read_openrlhf(words)}

    assert given["--n_samples_per_prompt"] == "8" and given["--pretrain"] == "m"
    assert given["--save_path"] == value


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("deepspeed openrlhf.cli.train_prm", "train otherwise first"),
        ("python -m openrlhf.cli.serve_rm", "trains nothing"),
        ("python3 -m mine.train_ppo_ray", "that this importer knows"),
        ("python3 /root/mine/train.py", "that this importer knows"),
    ],
)
def test_another_program_is_refused_by_name_and_its_flags_are_read(program: str, said: str) -> None:
    found = of_script(f"{program} {FLAGS}\n")

    why = refused(found)["python -m"]
    assert said in why and why.partition(":")[0] in program
    assert not found.may_run()
    assert "--prompt_data" in {entry.name for entry in found.report.entries if entry.verdict is Verdict.TRANSLATED}


def test_another_program_on_our_command_line_ends_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "openrlhf", "--", "python3", "-m", "openrlhf.cli.train_prm", *FLAGS.split()]) == 1
    assert "python -m = openrlhf.cli.train_prm" in capsys.readouterr().err


def test_the_trainer_is_read_beside_other_programs() -> None:
    text = f"python -m openrlhf.cli.serve_rm --reward_pretrain r &\npython3 -m {PPO} {FLAGS}\n"

    assert of_script(text).may_run()


@pytest.mark.parametrize("text", ["echo hello", "python3 data.py --pretrained x", f"python -m {PPO} {FLAGS}\n" * 2])
def test_no_trainer_or_two_of_them_is_a_message(text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"must start|--program N"):
        of_script(text)


def test_a_value_that_is_not_known_is_refused_by_its_flag_and_the_others_are_read() -> None:
    found = of_script(f"D=$(date)\npython3 -m {PPO} {FLAGS} --eval_dataset $D/x --n_samples_per_prompt 4\n")

    assert list(refused(found)) == ["--eval_dataset"]
    assert field(found, "rollout.group_size") == 4


def test_a_variable_that_the_script_does_not_set_is_of_the_environment() -> None:
    found = of_script(f"python3 -m {PPO} {FLAGS} --seed $SEED\n", {"SEED": "11"})

    assert field(found, "seed") == 11


@pytest.mark.parametrize(
    ("url", "metric"), [("http://grader:5000/get_reward", "remote/score"), ("grade.py", "custom/score")]
)
def test_the_dynamic_filter_judges_scores_as_openrlhf_does(url: str, metric: str) -> None:
    found = import_flat("openrlhf", {**BASES["openrlhf"], "--remote_rm_url": url, "--dynamic_filtering": True})

    assert field(found, "reward.group_filter")["metric"] == metric


def test_a_reward_model_reads_the_policys_text_and_several_are_added_up() -> None:
    given = {"--remote_rm_url": None, "--reward_pretrain": "/rm/a,owner/b", "--normalize_reward": True}
    found = import_flat("openrlhf", {**BASES["openrlhf"], **given, "--critic_pretrain": "model"})

    first, second = field(found, "reward.components")
    assert (first["kind"], first["path"], first["reads"], first["normalise"], first["weight"]) == (
        "reward_model", "/rm/a", "text", "stored", 1.0
    )  # fmt: skip
    assert (second["path"], second["name"]) == ("owner/b", "reward_model_1")
    assert first["max_tokens"] > field(found, "rollout.sampling.max_new_tokens")


def test_an_agent_file_grades_itself_and_has_no_held_out_rows() -> None:
    given = {**BASES["openrlhf"], "--agent_func_path": "agent.py", "--remote_rm_url": None}
    found = import_flat("openrlhf", {**given, "--eval_dataset": None})

    assert [each["kind"] for each in field(found, "reward.components")] == ["agent"]
    assert field(found, "rollout.agents") is not None
    assert list(refused(import_flat("openrlhf", given))) == ["--eval_dataset"]


def test_an_agents_scores_are_what_the_dynamic_filter_judges() -> None:
    given = {**BASES["openrlhf"], "--agent_func_path": "agent.py", "--remote_rm_url": None, "--eval_dataset": None}

    found = import_flat("openrlhf", {**given, "--dynamic_filtering": True})

    assert field(found, "reward.group_filter.metric") == "agent/score"


def test_an_agents_turn_may_take_what_the_context_leaves() -> None:
    given = {**BASES["openrlhf"], "--agent_func_path": "agent.py", "--remote_rm_url": None, "--eval_dataset": None}

    found = import_flat("openrlhf", {**given, "--data.max_len": 4096})

    assert field(found, "rollout.engine.context_tokens") == 4096
    assert field(found, "rollout.sampling.max_new_tokens") == 4095


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"--remote_rm_url": None, "--reward_pretrain": "r,s"}, "r"),
        ({"--remote_rm_url": None, "--reward_pretrain": "r", "--critic_pretrain": "c"}, "c"),
        ({"--critic_pretrain": "model"}, None),
        ({"--reward_pretrain": "r"}, None),
    ],
    ids=["the first reward model", "its own", "the policy", "the policy beside a grader"],
)
def test_a_critic_begins_as_openrlhfs_does(given: dict[str, Any], path: str | None) -> None:
    found = import_flat("openrlhf", {**BASES["openrlhf"], "--pretrain": "model", **given})

    assert field(found, "algorithm.value_loss").get("path") == path


def test_several_urls_are_servers_of_one_grader() -> None:
    urls = "http://127.0.0.1:5000/x, https://grader.example.org/x,http://127.0.0.1:5000/x"
    found = import_flat("openrlhf", {**BASES["openrlhf"], "--remote_rm_url": urls, "--dynamic_filtering": True})

    (component,) = field(found, "reward.components")
    assert component["urls"] == [
        {"url": "http://127.0.0.1:5000/x", "weight": 2.0}, {"url": "https://grader.example.org/x", "weight": 1.0}
    ]  # fmt: skip
    assert component["url"] is None and component["dialect"] == "openrlhf" and component["allow_private"]
    assert field(found, "reward.group_filter")["metric"] == "remote/score"


def test_normalised_rewards_touch_no_reward_of_a_url_or_a_file() -> None:
    report = import_flat("openrlhf", {**BASES["openrlhf"], "--normalize_reward": True}).report

    assert report.refused == [] and report.unsupported == []
    report = import_flat("openrlhf", {**BASES["openrlhf"], "--normalize_reward": True, "--reward_pretrain": "r"}).report
    assert report.refused == []


FILTER = {**BASES["verl"], "algorithm.filter_groups.enable": True}


@pytest.mark.parametrize("metric", ["acc", "format_score"])
def test_verls_filter_judges_what_the_reward_function_returns_by_that_name(metric: str) -> None:
    found = import_flat("verl", {**FILTER, "algorithm.filter_groups.metric": metric})

    assert field(found, "reward.filter_zero_spread") is False
    section = field(found, "reward.group_filter")
    assert (section["kind"], section["metric"]) == ("spread_above", f"custom/{metric}")


@pytest.mark.parametrize("metric", ["reward", "score", "seq_reward", "seq_final_reward", None])
def test_verls_filter_judges_the_reward_by_any_of_its_names(metric: str | None) -> None:
    found = import_flat("verl", {**FILTER, "algorithm.filter_groups.metric": metric})

    assert found.report.refused == []
    assert field(found, "reward.filter_zero_spread") is True


@pytest.mark.parametrize(("metric", "is_refused"), [("reward", True), ("seq_reward", True), ("score", False)])
def test_a_filter_after_the_overlong_penalty_is_refused(metric: str, is_refused: bool) -> None:
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg"
    shaped = {"reward_model.reward_manager": "dapo", f"{buffer}.enable": True, f"{buffer}.len": 64}

    report = import_flat("verl", {**FILTER, **shaped, "algorithm.filter_groups.metric": metric}).report

    assert [entry.name for entry in report.refused] == (["algorithm.filter_groups.metric"] if is_refused else [])


def test_weights_of_datasets_that_are_no_numbers_are_a_message() -> None:
    line = "python3 -m openrlhf.cli.train_dpo --pretrain m --dataset ./a.jsonl,./b.jsonl --dataset_probs '$1'"
    given = read("openrlhf", line, (), {}, source="run.sh")

    with pytest.raises(InvalidSpec, match="a list of numbers"):
        build(system_of("openrlhf", given), given)
