"""What is asked for and not done is seen at a glance, apart from what has no meaning and from what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.cli.__main__ import main
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS
from tests.unit.importers.sources import BASES, import_flat, nested

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LISTS = Path(__file__).parent / "parameters"


@pytest.mark.parametrize(
    ("system", "name", "value"),
    [
        ("verl", f"{ACTOR}.strategy", "fsdp2"),
        ("verl", f"{ACTOR}.fsdp_config.param_offload", True),
        ("verl", f"{ACTOR}.fsdp_config.optimizer_offload", "True"),
        ("verl", f"{ACTOR}.fsdp_config.fsdp_size", 8),
        ("verl", f"{ACTOR}.megatron.tensor_model_parallel_size", 4),
        ("verl", f"{ACTOR}.megatron.expert_model_parallel_size", 4),
        ("verl", f"{ACTOR}.megatron.pipeline_model_parallel_size", 4),
        ("verl", f"{ACTOR}.megatron.param_offload", True),
        ("verl", f"{ACTOR}.megatron.param_offload", "True"),
        ("verl", f"{ACTOR}.fsdp_config.use_orig_params", True),
        ("verl", f"{ACTOR}.megatron.override_transformer_config.recompute_granularity", "full"),
        ("verl", f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction", 1),
        ("verl", f"{ACTOR}.ulysses_sequence_parallel_size", 4),
        ("verl", "actor_rollout_ref.model.enable_activation_offload", True),
        ("verl", f"{ROLLOUT}.name", "vllm"),
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size", 2),
        ("verl", f"{ROLLOUT}.gpu_memory_utilization", 0.6),
        ("verl", "actor_rollout_ref.actor.use_prefix_grouper", True),
        ("verl", "global_profiler.tool", "nsys"),
        ("verl", f"{ACTOR}.profiler.discrete", True),
        ("verl", "trainer.default_local_dir", "/checkpoints"),
        ("verl", "trainer.val_before_train", False),
        ("verl", "trainer.max_critic_ckpt_to_keep", 2),
        ("verl", "model_engine", "megatron"),
        ("verl", f"{ACTOR}.veomni.param_offload", True),
        ("verl", f"{ACTOR}.profiler.tool_config.npu.level", "level1"),
        ("verl", "actor_rollout_ref.ref.use_torch_compile", True),
        ("verl", f"{ROLLOUT}.multi_stage_wake_up", True),
        ("roll", "reference.model_args.attn_implementation", "fa2"),
        ("roll", "actor_train.model_args.ulysses_size", 2),
        ("openrlhf", "--zero_stage", 3),
        ("openrlhf", "--adam_offload", True),
        ("openrlhf", "--colocate_all_models", True),
        ("openrlhf", "--vllm_tensor_parallel_size", 2),
        ("openrlhf", "--ref_num_gpus_per_node", 8),
        ("roll", "actor_infer.strategy_args.strategy_name", "vllm"),
        ("roll", "actor_train.strategy_args.strategy_name", "megatron_train"),
        ("roll", "actor_train.model_args.attn_implementation", "fa2"),
        ("openrlhf", "--attn_implementation", "flash_attention_2"),
        ("openrlhf", "--use_liger_kernel", True),
        ("verl", "actor_rollout_ref.model.override_config.attn_implementation", "flash_attention_2"),
        ("verl", "actor_rollout_ref.model.use_liger", True),
        ("verl", f"{ACTOR}.use_torch_compile", True),
        ("roll", "actor_infer.device_mapping", "list(range(0,8))"),
        ("roll", "rewards.math.world_size", 8),
        ("roll", "num_gpus_per_node", 8),
    ],
)
def test_a_way_to_run_that_the_fleet_does_not_have_is_unsupported(system: str, name: str, value: Any) -> None:
    found = import_flat(system, {**BASES[system], name: value})

    assert [entry.name for entry in found.report.unsupported] == [name]
    assert found.may_run() and not found.may_run(strict=True)


@pytest.mark.parametrize(
    ("system", "name", "value"),
    [
        ("verl", f"{ACTOR}.fsdp_config.param_offload", False),
        ("verl", f"{ACTOR}.fsdp_config.fsdp_size", -1),
        ("verl", f"{ACTOR}.megatron.tensor_model_parallel_size", 1),
        ("verl", f"{ACTOR}.ulysses_sequence_parallel_size", 1),
        ("verl", "actor_rollout_ref.hybrid_engine", False),
        ("verl", "trainer.n_gpus_per_node", 1),
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size", 1),
        ("verl", "trainer.val_before_train", True),
        ("verl", "trainer.default_local_dir", None),
        ("openrlhf", "--zero_stage", 0),
        ("openrlhf", "--actor_num_nodes", 1),
    ],
)
def test_a_way_to_run_that_is_the_fleets_own_is_not(system: str, name: str, value: Any) -> None:
    report = import_flat(system, {**BASES[system], name: value}).report

    assert report.unsupported == [] and report.refused == []


@pytest.mark.parametrize(
    ("system", "name", "value", "word"),
    [
        ("verl", f"{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer", True, "moments"),
        ("verl", f"{ACTOR}.megatron.override_transformer_config.moe_router_dtype", "fp32", "other experts"),
        ("roll", "actor_train.strategy_args.strategy_config.moe_router_dtype", "fp32", "other experts"),
    ],
)
def test_what_rounds_otherwise_is_unsupported_and_not_called_the_same(
    system: str, name: str, value: Any, word: str
) -> None:
    found = import_flat(system, {**BASES[system], name: value})

    (entry,) = found.report.unsupported
    assert entry.name == name and word in entry.detail
    assert "not what is computed" not in entry.detail


GPUS = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 8}
TENSOR, EXPERT = (f"{ACTOR}.megatron.{kind}_model_parallel_size" for kind in ("tensor", "expert"))


def test_megatrons_tensor_and_expert_parallelism_become_ours() -> None:
    found = import_flat("verl", {**BASES["verl"], **GPUS, TENSOR: 2, EXPERT: 4})

    assert found.spec is not None and found.report.unsupported == []
    parallelism = found.spec.parallelism
    assert (parallelism.ranks, parallelism.tensor_parallel, parallelism.expert_parallel) == (8, 2, 4)


@pytest.mark.parametrize("sizes", [{TENSOR: 3}, {EXPERT: 3}, {TENSOR: 4, EXPERT: 2}], ids=str)
def test_what_does_not_divide_the_gpus_is_unsupported_by_name(sizes: dict[str, int]) -> None:
    found = import_flat("verl", {**BASES["verl"], **GPUS, **sizes})

    assert found.spec is not None
    assert [(entry.name, "GPUs of the trainer" in entry.detail) for entry in found.report.unsupported] == [
        (list(sizes)[-1], True)
    ]


@pytest.mark.parametrize("name", ["moe_router_bias_update_rate", "attention_dropout", "num_layers", "anything_new"])
def test_what_changes_the_model_or_its_loss_is_refused_though_it_is_megatrons(name: str) -> None:
    full = f"{ACTOR}.megatron.override_transformer_config.{name}"

    report = import_flat("verl", {**BASES["verl"], full: 0.5}).report

    assert [entry.name for entry in report.refused] == [full]


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_reason_of_what_is_ignored_speaks_of_speed_or_memory(system: str) -> None:
    for row in SYSTEMS[system].parameters.values():
        if row.verdict is Verdict.IGNORED:
            assert "speed" not in row.reason and "memory" not in row.reason, row.name


def test_the_report_counts_it_apart_and_says_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "launch.yaml", tmp_path / "spec.yaml"
    path.write_text(
        yaml.safe_dump(nested({**BASES["verl"], "trainer.val_before_train": False, f"{ROLLOUT}.name": "sglang"}))
    )
    command = ["import", "verl", str(path), "--output", str(output)]

    assert main(command) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "2 unsupported" in first and "0 refused" in first
    assert second.startswith("2 asked for and not done")
    assert main([*command, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["unsupported"] == 2


def test_strictness_makes_it_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "launch.yaml", tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(nested({**BASES["verl"], "trainer.val_before_train": False})))
    command = ["import", "verl", str(path), "--output", str(output), "--strict"]

    assert main(command) == 1
    assert "1 unsupported (accepted without --strict)" in capsys.readouterr().err
    assert not output.exists()
    path.write_text(yaml.safe_dump(nested(BASES["verl"])))
    assert main(command) == 0


def test_coverage_counts_it_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "coverage", str(LISTS), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    verdicts = {row["name"]: row["verdict"] for row in found["parameters"]}
    assert found["counts"]["verl.json"]["unsupported"] > 30
    assert verdicts["--zero_stage"] == "unsupported"


ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
NARROW = f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype"
SEVERAL = {
    "verl": GPUS,
    "openrlhf": {"--actor_num_gpus_per_node": 4},
    "roll": {"actor_train.device_mapping": "list(range(0,4))"},
}


@pytest.mark.parametrize(
    ("system", "given", "field", "value"),
    [
        ("verl", {ATTENTION: "flash_attention_2"}, "model.attention", "flash_attention_2"),
        ("verl", {"actor_rollout_ref.model.use_liger": True}, "model.kernels", "liger"),
        ("verl", {"actor_rollout_ref.model.enable_activation_offload": True}, "parallelism.offload.activations", True),
        ("verl", {NARROW: "fp32"}, "parallelism.mixed_precision.reduce", "float32"),
        ("openrlhf", {"--attn_implementation": "flash_attention_3"}, "model.attention", "flash_attention_3"),
        ("openrlhf", {"--use_liger_kernel": True}, "model.kernels", "liger"),
        ("roll", {"actor_train.model_args.attn_implementation": "fa2"}, "model.attention", "flash_attention_2"),
        ("roll", {"actor_train.model_args.disable_gradient_checkpointing": False},
         "optimisation.activation_checkpointing", True),
    ],
)  # fmt: skip
def test_kernels_and_memory_are_those_of_the_file_where_the_trainer_has_gpus(
    system: str, given: dict[str, Any], field: str, value: Any
) -> None:
    imported = import_flat(system, {**BASES[system], **SEVERAL[system], **given})

    assert imported.spec is not None
    found: Any = imported.spec
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value
    assert not {entry.name for entry in imported.report.unsupported} & set(given)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_attention_that_needs_no_gpu_is_the_same_anywhere(name: str) -> None:
    imported = import_flat("verl", {**BASES["verl"], ATTENTION: name})

    assert imported.spec is not None and imported.spec.model.attention == name


def test_sequences_that_ranks_share_are_attended_to_by_sdpa() -> None:
    given = {**GPUS, f"{ACTOR}.ulysses_sequence_parallel_size": 2, ATTENTION: "flash_attention_2"}

    imported = import_flat("verl", {**BASES["verl"], **given})

    assert imported.spec is not None and imported.spec.model.attention == "auto"
    assert [entry.name for entry in imported.report.unsupported] == [ATTENTION]


ONE_GPU = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 1}
KL = {f"{ACTOR}.use_kl_loss": True}
OFFLOAD = {
    f"{ACTOR}.fsdp_config.param_offload": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
}


@pytest.mark.parametrize(
    ("given", "chosen", "unsupported"),
    [
        (GPUS | KL | OFFLOAD, ["parameters"], 2),
        (ONE_GPU | KL | OFFLOAD, ["optimiser", "reference"], 1),
        (ONE_GPU | OFFLOAD, ["optimiser"], 2),
        (KL | OFFLOAD, [], 3),
        ({"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2} | KL | OFFLOAD, [], 3),
        (
            {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "actor_rollout_ref.hybrid_engine": False}
            | KL
            | OFFLOAD,
            ["parameters"],
            2,
        ),
        (GPUS | KL | OFFLOAD | {"actor_rollout_ref.hybrid_engine": True}, [], 3),
    ],
)
def test_offload_is_that_of_verl_where_the_trainer_has_gpus(
    given: dict[str, Any], chosen: list[str], unsupported: int
) -> None:
    imported = import_flat("verl", BASES["verl"] | given)

    assert imported.spec is not None
    assert imported.spec.parallelism.offload.chosen == chosen
    assert len([each for each in imported.report.unsupported if "offload" in each.name]) == unsupported
