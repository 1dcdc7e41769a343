"""What TRL's GRPO becomes: formulas, sizes, graders, releases."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build, look_up
from flotilla.importers.systems import detect, read, system_of
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.grading import GradingMessage, GradingSample
from tests.unit.importers.sources import BASES, import_flat

SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
UNIT = 2.0
def right(prompts, completions, answer, log_metric=None, **kwargs):
    if log_metric:
        log_metric("length", len(completions[0][0]["content"]))
    return [UNIT if text[0]["content"] == each else None for text, each in zip(completions, answer)]
trainer = GRPOTrainer(
    model="owner/model", reward_funcs=[right, think_format_reward], train_dataset=load_dataset("trl-lib/DeepMath-103K"),
    args=GRPOConfig(max_steps=10, reward_weights=[1.0, 0.5]),
)
"""


def imported(**more: Any) -> Imported:
    return import_flat("trl", {**BASES["trl"], **more})


def field(path: str, **more: Any) -> Any:
    found = imported(**more)
    assert found.spec is not None and found.may_run(), found.report.render()
    return look_up(found.spec.model_dump(mode="json"), path)


def test_a_batch_of_a_device_counts_answers_and_an_update_has_whole_groups() -> None:
    assert field("optimisation.groups_per_mini_batch", gradient_accumulation_steps=4, num_processes=2) == 8
    found = imported(per_device_train_batch_size=6, gradient_accumulation_steps=1)
    assert "an update of 6 answers holds no whole number of groups of 8" in found.report.render()


def test_a_generation_of_several_updates_scales_what_adamw_does_not_divide_out() -> None:
    more = {"steps_per_generation": 8, "num_iterations": 2, "max_grad_norm": 0.5}

    assert field("asynchrony.require_batches", **more) == 4
    assert field("optimisation.steps", **more) == 48 // 8
    assert (field("optimisation.max_grad_norm", **more), field("optimisation.epsilon", **more)) == (2.0, 4e-8)
    assert field("optimisation.max_grad_norm", **more, loss_type="grpo") == 0.5


@pytest.mark.parametrize(
    ("more", "path", "expected"),
    [
        ({}, "algorithm.aggregation.mode", "token-mean"),
        ({"loss_type": "grpo"}, "algorithm.aggregation.mode", "seq-mean-token-mean"),
        ({"loss_type": "dr_grpo"}, "algorithm.aggregation.fixed_length", 256),
        ({"loss_type": "bnpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
         "algorithm.aggregation.mode", "seq-mean-token-mean"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.policy_loss.clip_high", 4.0),
        ({"importance_sampling_level": "sequence"}, "algorithm.policy_loss.gradient", "sequence"),
        ({"delta": 2.0}, "algorithm.policy_loss.dual_clip", 2.0),
        ({"epsilon": 0.1}, "algorithm.policy_loss.clip_high", 0.1),
        ({"beta": 0.1}, "algorithm.kl.value_clamp", None),
        ({}, "algorithm.kl", None),
        ({"scale_rewards": False}, "algorithm.advantage.kind", "dr_grpo"),
        ({"mask_truncated_completions": True}, "reward.sample_mask.max_length", 256),
        ({}, "algorithm.correction", None),
        ({"use_vllm": True}, "algorithm.correction.weight.level", "sequence"),
        ({"use_vllm": True, "trl_version": "0.24.0"}, "algorithm.correction.weight.upper", 2.0),
        ({"use_vllm": True, "trl_version": "0.22.0"}, "algorithm.correction", None),
        ({"trl_version": "0.18.0", "gradient_accumulation_steps": 1}, "algorithm.kl.coefficient", 0.04),
        ({"trl_version": "0.17.0", "gradient_accumulation_steps": 1}, "rollout.sampling.top_k", 50),
        ({"max_prompt_length": 128}, "data.overlong.side", "left"),
        ({"trl_version": "0.25.0"}, "data.max_prompt_tokens", 512),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "optimisation.warmup_updates", 0),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, "optimisation.warmup_updates", 5),
        ({"warmup_steps": 0.1}, "optimisation.warmup_updates", 5),
        ({"peft_config.r": 4}, "model.lora.targets", ["q_proj", "v_proj"]),
        ({"model_init_kwargs.dtype": "bfloat16"}, "optimisation.masters", "model"),
        ({"model_init_kwargs.dtype": "bfloat16", "peft_config.r": 4}, "optimisation.masters", "float32"),
        ({"report_to": ["comet_ml", "wandb"]}, "tracking.trackers.0", None),
    ],
)  # fmt: skip
def test_a_parameter_means_what_trls_trainer_computes(more: dict[str, Any], path: str, expected: Any) -> None:
    found = imported(**more)

    assert found.spec is not None and found.may_run(), found.report.render()
    value = look_up(found.spec.model_dump(mode="json"), path)
    assert value == expected or (path.endswith(".0") and found.spec.tracking.trackers[0].kind == "wandb")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"loss_type": "vespo"}, "'vespo' is not offered here: use bnpo, cispo, dapo, dr_grpo, grpo, sapo"),
        ({"loss_type": "bnpo"}, "use loss_type dapo, the mean over all its tokens"),
        ({"loss_type": "cispo"}, "cispo takes epsilon_high"),
        ({"delta": 1.1}, "it must be above 1 + the clip, 1.2"),
        ({"scale_rewards": "batch"}, "'batch' is not offered here"),
        ({"learning_rte": 1}, "did you mean learning_rate?"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, "use loss_type dapo"),
        ({"reward_weights": [1, 2]}, "2 weights for 1 functions"),
        ({"reward_funcs": ["reasoning_accuracy_reward"]}, "no component leaves out what was thought"),
        ({"reward_funcs": ["my_function"]}, "no module and function with a dot"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_with_a_way_out(more: dict[str, Any], said: str) -> None:
    found = imported(**more)

    assert not found.may_run()
    assert said in " ".join(found.report.render().split())


def test_a_parameter_that_later_releases_dropped_names_the_release_that_is_read() -> None:
    [note] = [line for line in imported(max_prompt_length=128).report.suggestion if "read as" in line]

    assert note.startswith("read as TRL 0.27, the last release with max_prompt_length")


def of_script(text: str, *overrides: str) -> Imported:
    given = read("trl", text, overrides, {}, source="train.py")
    return build(system_of("trl", given), given, rows=1000)


def test_functions_of_a_script_and_of_trl_become_graders_with_their_weights() -> None:
    found = of_script(SCRIPT)

    assert found.spec is not None and found.may_run(), found.report.render()
    described = [(each.name, each.kind, each.weight) for each in found.spec.reward.components]
    assert described == [("right", "custom", 1.0), ("think_format_reward", "regex", 0.5)]
    assert (found.spec.data.label_column, found.spec.data.input_template) == (None, None)


def grader(imported: Imported, folder: Path) -> Callable[[GradingSample], Any]:
    [(name, text)] = imported.files.items()
    (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location("adapter", folder / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    found: Callable[[GradingSample], Any] = module.score
    return found


def test_an_adapter_gives_a_function_what_trl_gives_it(tmp_path: Path) -> None:
    score = grader(of_script(SCRIPT), tmp_path)

    sample = GradingSample(
        id="0/0", prompt="<user> 1+1", messages=(GradingMessage(role="user", content="1+1"),), response="2",
        metadata={"answer": "2"},
    )  # fmt: skip
    assert score(sample) == {"reward": 2.0, "metrics": {"length": 1.0}}
    assert score(sample.model_copy(update={"response": "3"})) is None


def test_a_function_of_another_module_and_a_plain_prompt_work_alike(tmp_path: Path) -> None:
    (tmp_path / "graders.py").write_text(
        "def long(prompts, completions):\n    return [len(c + p) for c, p in zip(completions, prompts)]\n"
    )
    found = import_flat("trl", {**BASES["trl"], "reward_funcs": ["graders.long"]})

    assert grader(found, tmp_path)(GradingSample(id="0/0", prompt="ab", response="cde"))["reward"] == 5.0


@pytest.mark.parametrize("name", ["completion_ids", "trainer_state"])
def test_a_function_that_asks_for_what_only_a_run_has_is_refused(name: str) -> None:
    found = of_script(SCRIPT.replace("prompts, completions, answer", f"{name}, completions, answer"))

    assert f"it reads {name}, and graders get no" in " ".join(found.report.render().split())


def test_a_trainer_without_a_job_here_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        InvalidSpec, match=r"no job of this kind.*GRPOTrainer, SFTTrainer, DPOTrainer, RewardTrainer.*KTOTrainer"
    ):
        of_script("from trl import PPOTrainer\nPPOTrainer(model='m')\n")


@pytest.mark.parametrize(
    ("text", "name", "system"),
    [
        ("from trl import SFTTrainer\n", "a.py", "trl"),
        ("reward_funcs: [accuracy_reward]\n", "a.yaml", "trl"),
        ("python3 -m openrlhf.cli.train_sft --pretrain a\n", "a.sh", "openrlhf"),
        ("actor_train:\n  x: 1\n", "a.yaml", "roll"),
        ("python3 -m verl.trainer.main_ppo\n", "a.sh", "verl"),
    ],
)
def test_a_launch_file_shows_whose_it_is(text: str, name: str, system: str) -> None:
    assert detect(text, name) == system


def test_a_file_without_marks_is_not_guessed() -> None:
    with pytest.raises(InvalidSpec, match=r"flotilla import verl\|openrlhf\|roll\|trl a\.yaml"):
        detect("a: 1\n", "a.yaml")


def test_the_command_detects_a_script_and_writes_its_graders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    code = main(["import", "auto", str(tmp_path / "train.py"), "-o", str(tmp_path / "spec.yaml"), "--json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out)["system"] == "trl"
    assert (tmp_path / "right_score_adapter.py").is_file()
