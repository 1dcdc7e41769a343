"""Launch files of trainers on finished answers become jobs; each row of their tables keeps its word."""

import json
import shlex
from typing import Any

import pytest

from flotilla.importers.build import Imported, build, look_up
from flotilla.importers.openrlhf.finished import FINISHED
from flotilla.importers.parameter import UNSET, Inherit, Parameter, Verdict
from flotilla.importers.roll.distilled import ROLL_DISTILL
from flotilla.importers.roll.fine_tuning import ROLL_SFT
from flotilla.importers.roll.finished import ROLL_DPO
from flotilla.importers.source import System
from flotilla.importers.systems import read, read_openrlhf, system_of
from flotilla.importers.trl.finished import TRL_FINISHED
from flotilla.importers.trl.rloo import TRL_RLOO
from flotilla.importers.values import count
from flotilla.importers.verl.engine_sft import VERL_ENGINE_SFT
from flotilla.importers.verl.finished import VERL_SFT
from flotilla.importers.verl.written import VERL_EVAL
from flotilla.shared.config.sections.job import DivergenceConfig, DpoLossConfig, KtoConfig, PreferenceConfig, SftConfig
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import label, nested, words_of

ROWS = 4096
VERL_BASE: dict[str, Any] = {"model.partial_pretrain": "owner/model", "data.train_files": "train.parquet"}
BASE: dict[str, Any] = {"--pretrain": "owner/model", "--dataset": "train.jsonl"}
ROLL_BASE: dict[str, Any] = {
    "pretrain": "owner/model",
    "actor_train.data_args.file_name": "train.jsonl",
    "sequence_length": 512,
    "chosen_key": "chosen",
    "max_steps": 50,
    "actor_train.training_args.gradient_accumulation_steps": 8,
}
SFT_BASE: dict[str, Any] = {
    "pretrain": "owner/model",
    "actor_train.data_args.file_name": "train.jsonl",
    "sequence_length": 512,
    "actor_train.training_args.gradient_accumulation_steps": 8,
    "response_key": "output",
}
DISTILL_BASE: dict[str, Any] = {
    "pretrain": "owner/model",
    "teacher_pretrain": "owner/teacher",
    "actor_train.data_args.file_name": "train.jsonl",
    "sequence_length": 512,
    "logits_topk": 0,
    "actor_train.training_args.gradient_accumulation_steps": 8,
}
ENGINE_BASE: dict[str, Any] = {"model.path": "owner/model", "data.train_files": "train.parquet"}
EVAL_BASE: dict[str, Any] = {"data.path": "answered.parquet"}
SYSTEMS: dict[str, System] = {
    **FINISHED,
    "verl": VERL_SFT,
    "verl engine": VERL_ENGINE_SFT,
    "verl eval": VERL_EVAL,
    "roll dpo": ROLL_DPO,
    "roll sft": ROLL_SFT,
    "roll distill": ROLL_DISTILL,
    **{f"trl {name}": system for name, system in TRL_FINISHED.items()},
    "trl RLOOTrainer": TRL_RLOO,
}
TRL_BASE: dict[str, Any] = {"model": "owner/model", "train_dataset": "owner/rows", "max_steps": 48}


def imported(name: str, values: dict[str, Any]) -> Imported:
    of = name.partition(" ")[0]
    if name == "verl engine":
        words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        given = read("verl", shlex.join(["torchrun", "-m", "verl.trainer.sft_trainer", *words]), (), {}, source="a.sh")
    elif of == "trl":
        text = json.dumps({"trainer": name.partition(" ")[2].removesuffix("Trainer"), **values})
        given = read("trl", text, (), {}, source="sft.yaml")
    elif of in {"verl", "roll"}:
        import yaml

        given = read(of, yaml.safe_dump(nested(values)), (), {}, source="sft.yaml")
    else:
        given = read_openrlhf(["python", "-m", name, *words_of(values)])
    system = system_of(of if of in {"verl", "roll", "trl"} else "openrlhf", given)
    assert system is SYSTEMS[name]
    return build(system, given, rows=ROWS, overrides=("model.path=owner/model",) if name == "verl eval" else ())


def base_of(name: str) -> dict[str, Any]:
    if name == "trl RLOOTrainer":
        return {**TRL_BASE, "reward_funcs": ["accuracy_reward"]}
    if name.startswith("trl"):
        return dict(TRL_BASE)
    if name == "roll dpo":
        return dict(ROLL_BASE)
    if name == "roll distill":
        return dict(DISTILL_BASE)
    if name == "roll sft":
        return dict(SFT_BASE)
    if name == "verl engine":
        return dict(ENGINE_BASE)
    if name.startswith("verl"):
        return dict(VERL_BASE if name == "verl" else EVAL_BASE)
    if name.endswith("_kd"):
        return BASE | {"--teacher_model": "owner/teacher", "--output_key": "response"}
    if name.endswith("_kto"):
        return BASE | {"--output_key": "response"}
    return BASE | ({"--output_key": "response"} if name.endswith("sft") else {"--prompt_key": "prompt"})


def rows_with(*verdicts: Verdict) -> list[tuple[str, Parameter]]:
    return [
        (name, row)
        for name, system in SYSTEMS.items()
        for row in system.parameters.values()
        if row.verdict in verdicts and not row.is_tree
    ]


@pytest.mark.parametrize(("name", "row"), rows_with(Verdict.APPLIED, Verdict.TRANSLATED), ids=label)
def test_a_changed_parameter_changes_the_field_that_its_row_names(name: str, row: Parameter) -> None:
    base = {**base_of(name), **row.context}
    base = {key: value for key, value in base.items() if value is not None}
    before, after = imported(name, base), imported(name, {**base, row.name: row.example})

    assert before.spec is not None and after.spec is not None, after.report.problems
    entry = next(entry for entry in after.report.entries if entry.name == row.name)
    assert entry.verdict is row.verdict, entry
    found = [look_up(each.spec.model_dump(mode="json"), row.targets[-1]) for each in (before, after) if each.spec]
    if row.targets[-1] != "data.sources" or found[1] is not None:
        assert found[0] != found[1], row.targets


@pytest.mark.parametrize(("name", "row"), rows_with(Verdict.REFUSED), ids=label)
def test_what_is_refused_is_refused_and_its_default_is_not(name: str, row: Parameter) -> None:
    base = base_of(name)

    found = imported(name, {**base, row.name: 64 if row.convert is count else "another"})
    assert row.is_judged or [entry.name for entry in found.report.refused] == [row.name]
    if row.default not in (UNSET, None, False) and not isinstance(row.default, Inherit):
        assert imported(name, {**base, row.name: row.default}).may_run()


@pytest.mark.parametrize("written", [[0.9, 0.95], "[0.9,0.95]", "(0.9, 0.95)", "0.9 0.95"])
def test_a_list_of_numbers_is_read_with_the_quotes_that_a_script_leaves_around_it(written: Any) -> None:
    found = imported("verl", VERL_BASE | {"data.prompt_key": "q", "data.response_key": "a", "optim.betas": written})

    assert found.spec is not None, found.report.problems
    assert found.spec.optimisation.betas == (0.9, 0.95)


def test_a_list_with_a_word_among_its_numbers_is_refused_whole() -> None:
    with pytest.raises(InvalidSpec, match=r"optim\.betas: must be a list of numbers, got '\[0\.9,many\]'"):
        imported("verl", VERL_BASE | {"optim.betas": "[0.9,many]"})


@pytest.mark.parametrize(
    ("program", "path", "expected"),
    [
        ("train_sft", "data.input_template", "User: {}\nAssistant: "),
        ("train_sft", "job.max_tokens", 2048),
        ("train_sft", "optimisation.steps", 2 * ROWS // 128),
        ("train_sft", "optimisation.learning_rate", 5e-6),
        ("train_dpo", "job.max_tokens", 512),
        ("train_dpo", "optimisation.learning_rate", 1e-5),
        ("train_dpo", "optimisation.micro_batch_tokens", 8 * 512),
        ("train_dpo", "data.input_template", "{}"),
        ("train_kto", "data.input_template", "User: {}\nAssistant: "),
        ("train_kto", "job.beta", 0.01),
        ("train_kto", "job.label_column", "label"),
        ("train_kto", "job.overlong", "truncate"),
        ("train_kto", "optimisation.learning_rate", 1e-5),
        (
            "train_kd",
            "job.distillation",
            {"path": "owner/teacher", "revision": None, "dtype": "bfloat16", "coefficient": 0.4}
            | {"divergence": DivergenceConfig().model_dump(mode="json")},
        ),
        ("train_kd", "optimisation.steps", ROWS // 128),
        ("train_rm", "optimisation.learning_rate", 9e-6),
        ("train_rm", "optimisation.micro_batch_tokens", 512),
        ("train_rm", "optimisation.steps", ROWS // 128),
    ],
)
def test_each_program_of_openrlhfs_has_defaults_of_its_own(program: str, path: str, expected: Any) -> None:
    name = f"openrlhf.cli.{program}"

    found = imported(name, base_of(name))

    assert found.spec is not None and found.may_run(), found.report.render()
    assert look_up(found.spec.model_dump(mode="json"), path) == expected


def test_dotted_flags_of_newer_releases_are_those_of_older_ones() -> None:
    dotted = {
        "--model.model_name_or_path": "owner/model", "--data.dataset": "owner/rows", "--data.input_key": "q",
        "--data.output_key": "a", "--adam.lr": 2e-6, "--adam.betas": [0.9, 0.99], "--train.max_epochs": 1,
        "--model.gradient_checkpointing_enable": True, "--ds.zero_stage": 3, "--ckpt.load_enable": True,
        "--ckpt.output_dir": "out", "--logger.logging_steps": 1, "--data.max_len": 1024,
    }  # fmt: skip

    found = imported("openrlhf.cli.train_sft", dotted)

    assert found.spec is not None and found.may_run(), found.report.render()
    assert (found.spec.optimisation.learning_rate, found.spec.optimisation.betas) == (2e-6, (0.9, 0.99))
    assert found.spec.optimisation.activation_checkpointing


def test_verls_block_of_20_parameters_is_known() -> None:
    names = [alias for row in VERL_SFT.parameters.values() for alias in row.aliases if alias.startswith("sft.")]

    assert len(names) == 20


def test_verls_wsd_leaves_a_tenth_of_the_updates_after_warm_up_for_its_cosine() -> None:
    values = {"trainer.total_training_steps": 107, "optim.lr_warmup_steps_ratio": 0.1, "optim.lr_scheduler": "wsd"}

    found = imported("verl", VERL_BASE | values)

    assert found.spec is not None, found.report.problems
    ours = found.spec.optimisation
    assert (ours.schedule, ours.warmup_updates, ours.wsd_decay, ours.wsd_decay_updates) == ("wsd", 11, "cosine", 10)


@pytest.mark.parametrize(("decay", "expected"), [(0.01, True), (0, False)])
def test_verls_optimiser_of_answers_decays_all_parameters(decay: float, expected: bool) -> None:
    found = imported("verl", VERL_BASE | {"optim.weight_decay": decay})

    assert found.spec is not None, found.report.problems
    assert found.spec.optimisation.decay_all is expected


def test_a_models_own_code_is_set_aside_in_verls_fine_tuning_as_in_its_reinforcement_learning() -> None:
    found = imported("verl", VERL_BASE | {"model.trust_remote_code": True})

    assert found.may_run()
    assert [e.verdict for e in found.report.entries if e.name == "model.trust_remote_code"] == [Verdict.UNSUPPORTED]


def test_verls_newer_trainer_has_defaults_of_its_own() -> None:
    found = imported("verl engine", ENGINE_BASE | {"optim.lr_warmup_steps_ratio": 0.1})

    assert found.spec is not None and found.may_run(), found.report.render()
    ours = found.spec.optimisation
    assert (ours.learning_rate, ours.betas, ours.schedule, ours.decay_all) == (1e-3, (0.9, 0.999), "constant", True)
    assert (ours.micro_batch_tokens, ours.warmup_updates, found.spec.model.dtype) == (8192, 6, "bfloat16")
    assert (found.spec.job.kind, found.spec.data.prompt_column) == ("sft", "messages")


def test_a_script_of_verls_with_conversations() -> None:
    text = (
        "torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/t.parquet "
        "data.val_files=$HOME/v.parquet data.multiturn.enable=true data.multiturn.messages_key=chat "
        "model.partial_pretrain=owner/model optim.lr=1e-4 trainer.total_training_steps=30 trainer.logger=console\n"
    )
    given = read("verl", text, (), {"HOME": "/data"}, source="run.sh")
    found = build(system_of("verl", given), given)

    assert found.spec is not None and found.may_run(), found.report.render()
    spec = found.spec
    assert (spec.job.kind, spec.data.prompt_column, spec.optimisation.steps) == ("sft", "chat", 30)
    assert spec.finished_job is not None and spec.finished_job.held_out is not None
    assert spec.finished_job.held_out.path == "~/v.parquet"


def test_a_script_of_verls_that_scores_written_answers() -> None:
    text = (
        "python3 -m verl.trainer.main_eval data.path=$HOME/data/answered.parquet data.prompt_key=prompt "
        "data.response_key=responses custom_reward_function.path=grade.py custom_reward_function.name=reward_func\n"
    )
    given = read("verl", text, (), {"HOME": "/data"}, source="eval.sh")

    found = build(system_of("verl", given), given)
    set_too = build(system_of("verl", given), given, overrides=("model.path=owner/model",))

    assert [problem.partition(":")[0] for problem in found.report.problems] == ["model.path"]
    assert set_too.may_run(), set_too.report.render()
    assert set_too.document["job"] == {"kind": "evaluation", "response_column": "responses"}
    assert set_too.document["evaluation"] == {"path": "~/data/answered.parquet"}
    assert set_too.document["data"]["label_column"] == "reward_model.ground_truth"
    (component,) = set_too.document["reward"]["components"]
    assert component["path"].partition(":")[0] in set_too.files


def test_a_place_inside_of_a_column() -> None:
    values = {"data.prompt_key": "extra_info", "data.prompt_dict_keys": ["question"], "data.response_key": "extra_info"}
    found = imported("verl", {**VERL_BASE, **values, "data.response_dict_keys": ["answer"]})

    assert found.document["data"]["prompt_column"] == "extra_info.question"
    assert found.document["job"]["response_column"] == "extra_info.answer"


@pytest.mark.parametrize(
    ("program", "flags", "kind"),
    [
        ("train_sft", "--input_key q --output_key a --max_len 512", "sft"),
        ("train_dpo", "--chosen_key better --rejected_key worse --apply_chat_template --ipo", "preference"),
        ("train_rm", "--chosen_key chosen --rejected_key rejected --loss logexp", "reward_model"),
        ("train_sft", "--load_checkpoint --input_key q --output_key a", "sft"),
        ("train_kto", "--input_key q --output_key a --label_key score --beta 0.1 --ref_offload", "kto"),
        ("train_kto", "--input_key chat --apply_chat_template", "kto"),
        ("train_kd", "--input_key q --output_key a --teacher_model owner/large --kd_coef 0.4 --teacher_offload", "sft"),
    ],
)
def test_a_script_of_openrlhfs(program: str, flags: str, kind: str) -> None:
    text = (
        f"deepspeed --module openrlhf.cli.{program} --pretrain owner/model --dataset owner/rows --train_batch_size 256 "
        f"--micro_train_batch_size 2 --max_epochs 1 --bf16 --zero_stage 3 --learning_rate 9e-6 "
        f"--packing_samples {flags}\n"
    )
    given = read("openrlhf", text, {}, {}, source="run.sh")  # type: ignore[arg-type]
    found = build(system_of("openrlhf", given), given, rows=ROWS)

    assert found.spec is not None and found.may_run(), found.report.render()
    assert (found.spec.job.kind, found.spec.optimisation.steps) == (kind, 16)
    assert not found.spec.samples_answers


def test_openrlhfs_distillation_without_weight_is_fine_tuning_and_without_a_teacher_lacks_one() -> None:
    name = "openrlhf.cli.train_kd"

    none = imported(name, {**base_of(name), "--kd_coef": 0})
    lacking = imported(name, {key: value for key, value in base_of(name).items() if key != "--teacher_model"})

    assert none.spec is not None and isinstance(none.spec.job, SftConfig) and none.spec.job.distillation is None
    assert "job.distillation.path" in [each.partition(":")[0] for each in lacking.report.problems]


KTO = """
from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

KTOTrainer(
    model="owner/model",
    args=KTOConfig(output_dir="kto", beta=0.2, desirable_weight=1.5, max_length=512, max_steps=50{more}),
    train_dataset=load_dataset("owner/rows", split="train"),
).train()
"""


@pytest.mark.parametrize(("more", "point"), [("", "mismatched"), (', loss_type="apo_zero_unpaired"', "zero")])
def test_a_script_of_trls_with_labels(more: str, point: str) -> None:
    given = read("trl", KTO.replace("{more}", more), (), {}, source="kto.py")
    found = build(system_of("trl", given), given)

    assert found.spec is not None and found.may_run(), found.report.render()
    job = found.spec.job
    assert isinstance(job, KtoConfig)
    assert (job.beta, job.desirable_weight, job.undesirable_weight, job.reference_point) == (0.2, 1.5, 1.0, point)
    assert (found.spec.data.prompt_column, job.response_column, job.label_column) == ("prompt", "completion", "label")
    assert (job.max_tokens, found.spec.data.shuffle, found.spec.optimisation.learning_rate) == (512, False, 1e-6)


def test_keys_of_trls_yaml_show_that_rows_have_labels() -> None:
    text = (
        "model_name_or_path: owner/model\ndataset_name: owner/rows\nmax_steps: 8\nbeta: 0.1\nundesirable_weight: 2.0\n"
    )
    given = read("trl", text, (), {}, source="a.yaml")

    assert system_of("trl", given) is TRL_FINISHED["KTOTrainer"]
    assert build(system_of("trl", given), given).may_run()


def test_a_file_of_rolls_pairs_is_a_job_on_pairs() -> None:
    given = {
        **ROLL_BASE,
        "global_template": "qwen2_5",
        "validation.data_args.file_name": "heldout.json",
        "eval_steps": 100,
        "beta": 0.2,
        "actor_train.training_args.per_device_train_batch_size": 16,
        "actor_train.training_args.gradient_accumulation_steps": 1,
        "actor_train.training_args.lr_scheduler_type": "constant",
        "actor_train.training_args.warmup_steps": 20,
        "actor_train.training_args.num_train_epochs": 3,
        "actor_train.strategy_args.strategy_name": "megatron_train",
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "actor_train.device_mapping": "list(range(0,8))",
        "reference.model_args.dtype": "bf16",
        "reference.strategy_args.strategy_name": "megatron_infer",
    }
    found = imported("roll dpo", {**given, "max_steps": 500})

    assert found.spec is not None and found.may_run(), found.report.render()
    job, steps = found.spec.finished_job, found.spec.optimisation
    assert isinstance(job, PreferenceConfig) and job.held_out is not None
    assert (found.spec.data.prompt_column, job.chosen_column, job.rejected_column, job.max_tokens, job.overlong) == (
        "instruction", "chosen", "rejected", 512, "filter"
    )  # fmt: skip
    assert job.loss == DpoLossConfig(beta=0.2) and (job.held_out.path, job.held_out.every_steps) == (
        "heldout.json",
        100,
    )
    assert (steps.groups_per_mini_batch, steps.steps, steps.warmup_updates) == (64, 3 * (ROWS // 64), 20)
    assert imported("roll dpo", {**given, "max_steps": 70}).document["optimisation"]["steps"] == 70


@pytest.mark.parametrize(
    ("changes", "decays", "warm"),
    [({}, True, None), ({"actor_train.strategy_args.strategy_name": "megatron_train"}, None, 5)],
)
def test_the_trainer_of_rolls_pairs_decays_and_warms_up_as_it_does_elsewhere(
    changes: dict[str, Any], decays: bool | None, warm: int | None
) -> None:
    worker = {"training_args.weight_decay": 0.1, "training_args.lr_scheduler_type": "constant",
              "training_args.warmup_steps": 5, "strategy_args.strategy_name": "fsdp2_train"}  # fmt: skip
    found = imported("roll dpo", {**ROLL_BASE, **{f"actor_train.{name}": value for name, value in worker.items()},
                                  **changes})  # fmt: skip

    section = found.document["optimisation"]
    assert (section.get("decay_all"), section.get("warmup_updates")) == (decays, warm)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"sequence_length": None}, "job.max_tokens"), ({"pretrain": None}, "model.path"),
     ({"actor_train.data_args.file_name": None}, "data.path"), ({"max_steps": 0}, "optimisation.steps")],
)  # fmt: skip
def test_what_rolls_pairs_need_is_named(changes: dict[str, Any], problem: str) -> None:
    found = imported("roll dpo", {**ROLL_BASE, **changes})

    assert problem in [each.partition(":")[0] for each in found.report.problems]


def test_rolls_script_of_pairs_is_read_by_their_table() -> None:
    import yaml

    plain = {name: value for name, value in ROLL_BASE.items() if name != "chosen_key"}
    text = "python examples/start_dpo_pipeline.py --config_path dpo --config_name mine\n"
    files = {"mine": yaml.safe_dump(nested(plain))}
    given = read("roll", text, (), {}, source="run.sh", beside=files.get)

    assert system_of("roll", given) is ROLL_DPO
    found = build(ROLL_DPO, given, rows=ROWS)
    assert found.may_run(), found.report.render()


def test_a_file_of_rolls_fine_tuning_is_a_job_on_answers_that_joins_two_columns() -> None:
    given = {
        **{name.replace("actor_train", "sft_train"): value for name, value in SFT_BASE.items()},
        "query_key": "input",
        "eval_steps": 20,
        "validation.data_args.file_name": "heldout.json",
        "validation.data_args.template": "qwen2_5",
        "sft_train.training_args.num_train_epochs": 3,
        "sft_train.training_args.per_device_train_batch_size": 2,
        "sft_train.training_args.lr_scheduler_type": "cosine",
        "sft_train.strategy_args.strategy_name": "megatron_train",
        "sft_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "sft_train.use_sequence_packing": True,
        "sft_train.device_mapping": "list(range(0,6))",
    }
    found = imported("roll sft", given)

    assert found.spec is not None and found.may_run(), found.report.render()
    job, rows, steps = found.spec.finished_job, found.spec.data, found.spec.optimisation
    assert isinstance(job, SftConfig) and job.held_out is not None
    assert (rows.prompt_column, rows.input_column, job.response_column) == ("instruction", "input", "output")
    assert (rows.shuffle, job.overlong, job.max_tokens, job.held_out.every_steps) == (False, "truncate", 512, 20)
    assert (steps.groups_per_mini_batch, steps.steps) == (48, 3 * (ROWS // 48))
    assert (steps.schedule, steps.decay_updates) == ("cosine", 3 * ROWS // 48)


def test_rolls_script_of_fine_tuning_is_read_by_its_table() -> None:
    import yaml

    text = "python examples/start_sft_pipeline.py --config_path sft --config_name mine\n"
    plain = {name: value for name, value in SFT_BASE.items() if name != "response_key"}
    given = read("roll", text, (), {}, source="run.sh", beside={"mine": yaml.safe_dump(nested(plain))}.get)

    assert system_of("roll", given) is ROLL_SFT


def _as_roll_writes_it(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "student_pretrain" if name == "pretrain" else name.replace("actor_train", "student"): value
        for name, value in values.items()
    }


def test_a_file_of_rolls_distillation_of_written_answers_is_fine_tuning_with_a_teacher() -> None:
    given = {
        **_as_roll_writes_it(DISTILL_BASE),
        "distill_loss_weight": 0.85,
        "kd_objective": "forward_kl",
        "question_key": "question_zh",
        "answer_key": "answer_zh",
        "logits_transfer_backend": "nccl-only",
        "max_grad_norm": 1.0,
        "validation.data_args.file_name": ["heldout.json"],
        "validation.data_args.template": "qwen2_5",
        "student.data_args.template": "qwen2_5",
        "student.training_args.per_device_train_batch_size": 2,
        "student.training_args.lr_scheduler_type": "cosine",
        "student.strategy_args.strategy_name": "megatron_train",
        "student.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "student.use_sequence_packing": True,
        "student.device_mapping": "list(range(0,8))",
        "teacher.model_args.dtype": "bf16",
        "teacher.data_args.template": "qwen2_5",
        "teacher.training_args.per_device_train_batch_size": 2,
        "teacher.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "teacher.device_mapping": "list(range(0,8))",
    }
    found = imported("roll distill", given)

    assert found.spec is not None and found.may_run(), found.report.render()
    job, rows, steps = found.spec.finished_job, found.spec.data, found.spec.optimisation
    assert isinstance(job, SftConfig) and job.distillation is not None and job.held_out is not None
    assert (rows.prompt_column, job.response_column, job.train_on) == ("question_zh", "answer_zh", "all")
    assert (found.spec.model.path, job.distillation.path) == ("owner/model", "owner/teacher")
    assert (job.distillation.coefficient, job.distillation.dtype) == (0.85, "bfloat16")
    assert (steps.groups_per_mini_batch, steps.steps, steps.max_grad_norm) == (64, ROWS // 64, 1)
    assert (steps.schedule, steps.decay_updates) == ("cosine", ROWS // 16), "ROLL counts one device's share"


@pytest.mark.parametrize(
    ("given", "measure"),
    [
        ({"logits_topk": 0}, {}),
        ({"logits_topk": None}, {"top_k": 64}),
        ({"logits_topk": 32, "kd_temperature": 2, "teacher_temperature": 1.5},
         {"top_k": 32, "temperature": 2, "teacher_temperature": 1.5}),
        ({"kd_objective": "adaptive_kl", "adaptive_kl_alpha": 0.4}, {"kind": "adaptive_kl", "tail": 0.4}),
        ({"kd_objective": "skewed_reverse_kl"}, {"kind": "skewed_reverse_kl", "skew": 0.1}),
        ({"kd_objective": "js_divergence", "skew_lambda": 0.3}, {"kind": "js_divergence"}),
    ],
)  # fmt: skip
def test_rolls_objectives_of_distillation_and_their_options(given: dict[str, Any], measure: dict[str, Any]) -> None:
    options = {name: value for name, value in {**DISTILL_BASE, **given}.items() if value is not None}
    found = imported("roll distill", options)

    assert found.spec is not None and found.may_run(), found.report.render()
    job = found.spec.finished_job
    assert isinstance(job, SftConfig) and job.distillation is not None
    assert job.distillation.divergence == DivergenceConfig.model_validate(measure)


@pytest.mark.parametrize(("name", "value"), [("kd_objective", "hinge"), ("logits_topk", 1)])
def test_an_objective_that_there_is_not_is_refused_by_its_key(name: str, value: Any) -> None:
    refused = {
        entry.name: entry.detail for entry in imported("roll distill", {**DISTILL_BASE, name: value}).report.refused
    }

    assert list(refused) == [name]


def test_rolls_distillation_clips_nothing_by_itself_and_without_weight_is_fine_tuning() -> None:
    found = imported("roll distill", {**DISTILL_BASE, "distill_loss_weight": 0})

    assert found.spec is not None and found.may_run(), found.report.render()
    assert isinstance(found.spec.finished_job, SftConfig) and found.spec.finished_job.distillation is None
    assert found.spec.optimisation.max_grad_norm is None


def test_rolls_script_of_distillation_is_read_by_its_table() -> None:
    import yaml

    text = "python examples/start_distill_pipeline.py --config_path kd --config_name mine\n"
    plain = _as_roll_writes_it(DISTILL_BASE)
    given = read("roll", text, (), {}, source="run.sh", beside={"mine": yaml.safe_dump(nested(plain))}.get)

    assert system_of("roll", given) is ROLL_DISTILL
    found = build(ROLL_DISTILL, given, rows=ROWS)
    assert found.may_run(), found.report.render()
