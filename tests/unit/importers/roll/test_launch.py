"""ROLL's scripts: the file that one gives to a pipeline is read; other pipelines are refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.importers.build import Imported, build
from flotilla.importers.systems import SYSTEMS, read
from flotilla.services.reward.verdicts import reward_of
from flotilla.shared.config.sections.judge import JudgeModelConfig
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import BASES, import_flat, nested

CONFIG = yaml.safe_dump(nested(BASES["roll"]))
START = "python examples/start_rlvr_pipeline.py"


def of_script(text: str, files: Mapping[str, str]) -> Imported:
    return build(SYSTEMS["roll"], read("roll", text, (), {}, source="run.sh", beside=files.get))


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (f"{START} --config_path qwen --config_name rlvr", "examples/qwen/rlvr"),
        (f"{START} --config_path=qwen --config_name=rlvr.yaml", "../../examples/qwen/rlvr"),
        (f"{START} --config_path qwen --config_name rlvr", "rlvr"),
        (f"{START} --config_path $(basename $(dirname $0)) --config_name rlvr", "rlvr"),
        ("ROLL_PATH=/r\npython $ROLL_PATH/examples/start_rlvr_pipeline.py --config_name rlvr", "/r/examples/rlvr"),
    ],
)
def test_the_file_of_a_pipeline_is_read(command: str, place: str) -> None:
    found = of_script(f"#!/bin/bash\nset +x\n{command}\n", {place: CONFIG})

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.optimisation.steps == 10


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ("distill_vl", "no images"),
        ("reward_fl", "no answers"),
        ("mine", "that this importer"),
    ],
)
def test_another_pipeline_is_refused_by_name(pipeline: str, said: str) -> None:
    found = of_script(f"python examples/start_{pipeline}_pipeline.py --config_name rlvr\n", {"rlvr": CONFIG})

    refused = {entry.name: (entry.value, entry.detail) for entry in found.report.refused}
    assert refused["python"][0] == f"start_{pipeline}_pipeline.py" and said in refused["python"][1]
    assert not found.may_run()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "must start one pipeline"),
        (f"{START} --config_name a\n{START} --config_name b", "--program N"),
        (f"{START} --config_path qwen --config_name rlvr", "give --config-dir DIR"),
        (START, "give --config_name"),
        (f"{START} --config_name $(date)", "what a command prints is not known"),
    ],
)
def test_what_cannot_be_found_is_a_message(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        of_script(text, {})


def test_files_that_it_names_are_looked_for_from_its_own_folder() -> None:
    base = "defaults: [../config/base@_here_]\n" + CONFIG

    found = of_script(
        f"{START} --config_path qwen --config_name rlvr",
        {"examples/qwen/rlvr": base, "examples/config/base": "seed: 5"},
    )

    assert found.spec is not None and found.spec.seed == 5


def test_the_folder_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rlvr.yaml").write_text(CONFIG)
    script = tmp_path / "run.sh"
    script.write_text(f"{START} --config_path qwen --config_name rlvr\n")
    command = ["import", "roll", str(script)]

    assert main(command) == 1
    assert "rlvr" in capsys.readouterr().err
    assert main([*command, "--config-dir", str(tmp_path / "elsewhere")]) == 0


def test_workers_of_every_domain_become_graders_and_domains_may_be_in_several_files() -> None:
    folder = "roll.pipeline.rlvr.rewards"
    values = {
        "actor_train.data_args.file_name": ["math.jsonl", "general.jsonl"],
        "actor_train.data_args.domain_interleave_probs.ifeval": 0.25,
        "actor_train.data_args.domain_interleave_probs.qa": 0.75,
        "rewards.math.worker_cls": None,
        "rewards.ifeval.worker_cls": f"{folder}.ifeval_rule_reward_worker.GeneralRuleRewardWorker",
        "rewards.ifeval.tag_included": ["ifeval"],
        "rewards.ifeval.reward_type": "soft",
        "rewards.qa.worker_cls": f"{folder}.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
        "rewards.qa.tag_included": ["crossthinkqa"],
        "rewards.judged.worker_cls": f"{folder}.llm_judge_reward_worker.LLMJudgeRewardWorker",
        "rewards.judged.judge_model_type": "api",
        "rewards.judged.judge_api_url": "http://127.0.0.1:8000/v1",
        "rewards.judged.judge_model_name": "judge",
        "rewards.judged.tag_included": ["RLVR"],
    }
    base = {name: value for name, value in BASES["roll"].items() if name not in values}

    found = import_flat("roll", {**base, **{name: each for name, each in values.items() if each is not None}})

    assert found.spec is not None, found.report.problems
    assert found.report.refused == []
    kinds = {component.name: component.kind for component in found.spec.reward.components}
    assert kinds == {"ifeval": "ifeval", "qa": "choice", "judged": "judge"}
    first, second = found.spec.data.sources or ()
    assert (first.path, first.more_paths, first.weight) == ("math.jsonl", ("general.jsonl",), 0.25)
    assert second.only_data_sources == ("crossthinkqa",)


def judged(**more: Any) -> Imported:
    worker = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
    given = {f"rewards.judged.{name.replace('__', '.')}": value for name, value in more.items()}
    return import_flat("roll", {**BASES["roll"], "rewards.judged.worker_cls": worker, **given})


def test_a_judge_in_engines_of_its_own_is_the_model_that_they_serve() -> None:
    worker = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
    served = {f"reward_model.{name}": value for name, value in {
        "name": "judge", "model_args.model_name_or_path": "owner/served", "generating_args.temperature": 0.1,
        "strategy_args.strategy_name": "vllm", "device_mapping": "[6, 7]"}.items()}  # fmt: skip
    judge = {"worker_cls": worker, "judge_model_type": "cluster", "tag_included": ["RLVR"],
             "model_args.model_name_or_path": "owner/named", "generating_args.temperature": 0.3}  # fmt: skip
    found = import_flat("roll", {**BASES["roll"], **served,
                                 **{f"rewards.judged.{name}": value for name, value in judge.items()}})  # fmt: skip

    assert found.may_run() and found.spec is not None, found.report.render()
    (made,) = [each for each in found.spec.reward.components if isinstance(each, JudgeModelConfig)]
    assert (made.path, made.temperature) == ("owner/served", 0.3)


def test_a_judge_that_roll_runs_itself_is_a_model_of_the_reward_service() -> None:
    found = judged(
        judge_model_type="inference", judge_prompt="Qwen2.5-7B-Instruct-RLVR-prompt", tag_included=["RLVR"],
        model_args__model_name_or_path="owner/judge", model_args__dtype="bf16", model_args__attn_implementation="fa2",
        generating_args__temperature=0.8, generating_args__top_p=0.8, generating_args__max_new_tokens=100,
        generating_args__num_beams=1, data_args__template="qwen3", strategy_args__strategy_name="vllm",
    )  # fmt: skip

    assert found.may_run() and found.spec is not None, found.report.render()
    (judge,) = [each for each in found.spec.reward.components if each.kind == "judge_model"]
    assert isinstance(judge, JudgeModelConfig)
    assert (judge.path, judge.dtype, judge.data_sources) == ("owner/judge", "bfloat16", ("RLVR",))
    assert (judge.temperature, judge.top_p, judge.top_k, judge.max_new_tokens) == (0.8, 0.8, 50, 100)
    assert judge.chat_template_options == {"enable_thinking": True}
    assert judge.max_tokens == 1024 + 2048 + 1024
    replies = {"YES": 1.0, "It is yes, not no": 1.0, "NO": 0.0, "I cannot say": 0.0}
    assert {reply: reward_of(reply, judge) for reply in replies} == replies


@pytest.mark.parametrize(
    ("more", "name", "said"),
    [
        ({"judge_model_type": "local"}, "judge_model_type", "judge_api_url"),
        ({"judge_model_type": "cluster"}, "judge_model_type", "model_name_or_path"),
        ({"judge_model_type": "inference"}, "judge_model_type", "model_name_or_path"),
        ({"judge_model_type": "inference", "judge_prompt": "mine"}, "judge_prompt", "template of the judge"),
        ({"judge_model_type": "inference", "model_args__model_name_or_path": "m", "generating_args__num_beams": 4},
         "generating_args.num_beams", "one reply"),
    ],
)  # fmt: skip
def test_another_judge_is_refused_with_the_way_out(more: dict[str, Any], name: str, said: str) -> None:
    (entry,) = [each for each in judged(**more).report.refused if each.name.startswith("rewards.judged")]

    assert entry.name == f"rewards.judged.{name}"
    assert said in entry.detail


@pytest.mark.parametrize(
    ("strategy", "decay", "expected"),
    [("fsdp2_train", 0.1, True), ("fsdp2_train", 0, None), ("megatron_train", 0.1, None),
     ("deepspeed_train", 0.1, None)],
)  # fmt: skip
def test_fsdp2_decays_all_parameters_and_the_other_trainers_leave_biases_and_norms_out(
    strategy: str, decay: float, expected: bool | None
) -> None:
    named = {"actor_train.strategy_args.strategy_name": strategy, "actor_train.training_args.weight_decay": decay}
    found = import_flat("roll", {**BASES["roll"], **named})

    assert found.document["optimisation"].get("decay_all") == expected


TEACHER = {"teacher.model_args.model_name_or_path": "a-teacher", "teacher.model_args.dtype": "bf16"}
STUDENT = {name.replace("actor_", "student_", 1): value for name, value in BASES["roll"].items()}


def distilled(changes: Mapping[str, Any]) -> Imported:
    return import_flat("roll", {**BASES["roll"], **TEACHER, **changes})


@pytest.mark.parametrize(
    ("values", "coefficient", "pure"),
    [
        ({**STUDENT, **TEACHER}, 1.0, True),
        ({**BASES["roll"], **TEACHER, "is_pure_opd": True, "adv_estimator": "gae"}, 1.0, True),
        ({**BASES["roll"], **TEACHER, "use_opd": True, "adv_estimator": "reinforce", "teacher.opd_kl_coef": 0.5},
         0.5, False),
    ],
)  # fmt: skip
def test_a_teacher_is_one_of_ours_alone_or_beside_rewards(
    values: dict[str, Any], coefficient: float, pure: bool
) -> None:
    found = import_flat("roll", values)

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.algorithm.distillation is not None
    teacher = found.spec.algorithm.distillation
    assert (teacher.path, teacher.dtype, teacher.coefficient, teacher.pure) == (
        "a-teacher", "bfloat16", coefficient, pure
    )  # fmt: skip
    assert (found.spec.data.path, found.spec.optimisation.groups_per_mini_batch) == ("train.jsonl", 16)


def test_a_teacher_that_roll_does_not_read_teaches_nothing() -> None:
    assert "distillation" not in distilled({"adv_estimator": "reinforce"}).document.get("algorithm", {})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_opd": True, "is_pure_opd": True}, "use_opd"),
        ({"is_pure_opd": True, "kl_penalty": "k3"}, "kl_penalty"),
        ({"is_pure_opd": True, "whiten_advantages": True}, "whiten_advantages"),
        ({"use_opd": True, "adv_estimator": "reinforce", "advantage_clip": 2.0}, "advantage_clip"),
        ({"use_opd": True, "adv_estimator": "reinforce", "use_kl_loss": True, "kl_loss_coef": 0.1}, "use_opd"),
        ({"is_pure_opd": True, "teacher.tag_included": ["math"]}, "teacher.tag_included"),
    ],
)
def test_what_a_teacher_would_do_otherwise_here_is_refused(changes: dict[str, Any], name: str) -> None:
    assert name in [entry.name for entry in distilled(changes).report.refused]


def test_the_script_of_distillation_says_that_the_teacher_is_alone() -> None:
    files = {"opd": yaml.safe_dump(nested({**BASES["roll"], **TEACHER}))}
    found = of_script("python examples/start_onpolicy_distill_pipeline.py --config_name opd\n", files)

    assert found.spec is not None and found.spec.algorithm.distillation is not None, found.report.render()
    assert found.spec.algorithm.distillation.pure


def test_rewards_that_are_normalised_over_the_batch_are_so_by_the_estimator() -> None:
    more = {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch", "reward_clip": 10}
    found = import_flat("roll", {**BASES["roll"], **more})

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.reward is not None
    advantage = found.spec.algorithm.advantage.model_dump()
    assert (advantage["baseline"], advantage["divide_by_std"], advantage["score_clip"]) == (
        "batch_mean", True, (-10.0, 10.0)
    )  # fmt: skip
    assert found.spec.reward.shaping.clip is None and found.spec.reward.shaping.normalisation is None


@pytest.mark.parametrize(
    ("more", "mean", "std"),
    [
        ({"norm_mean_type": "running", "norm_std_type": "running"}, "batch_mean", True),
        ({"norm_std_type": "running"}, "none", True),
        ({"reward_norm": "running"}, "batch_mean", True),
        ({"reward_norm": "running", "reward_shift": True}, "batch_mean", False),
        ({"reward_norm": "running", "reward_scale": True}, "none", True),
    ],
)
def test_rewards_that_are_normalised_by_all_of_the_run_are_so_by_the_estimator(
    more: dict[str, Any], mean: str, *, std: bool
) -> None:
    found = import_flat("roll", {**BASES["roll"], "adv_estimator": "reinforce", **more})

    assert found.spec is not None and found.spec.reward is not None, found.report.render()
    advantage = found.spec.algorithm.advantage.model_dump()
    assert (advantage["baseline"], advantage["divide_by_std"], advantage["compared_with"]) == (mean, std, "run")
    assert found.spec.reward.shaping.normalisation is None


@pytest.mark.parametrize(
    "more",
    [
        {"adv_estimator": "gae"},
        {"norm_std_type": "group"},
        {"norm_std_type": "running"},
        {"norm_mean_type": "moving"},
        {"rewards.second.worker_cls": "a.MathRuleRewardWorker", "rewards.second.tag_included": ["b"]},
    ],
)
def test_what_cannot_be_normalised_over_the_batch_is_refused(more: dict[str, Any]) -> None:
    given = {"adv_estimator": "reinforce", "norm_mean_type": "batch", **more}

    assert not import_flat("roll", {**BASES["roll"], **given}).may_run()


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("val_greedy", True, False),
        ("ratio_type", "token", False),
        ("ratio_type", "segment", True),
        ("actor_infer.generating_args.do_sample", False, True),
        ("actor_train.apply_loss_scale", True, False),
        ("env_monitor.enable", True, False),
    ],
)
def test_what_roll_has_by_itself_or_reads_nowhere_asks_for_nothing(name: str, value: Any, is_refused: bool) -> None:
    made = import_flat("roll", {**BASES["roll"], name: value})

    assert [entry.name for entry in made.report.refused] == ([name] if is_refused else [])
