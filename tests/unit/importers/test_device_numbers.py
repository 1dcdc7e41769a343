"""Numbers of devices of other systems' launch files: what trainer and engines must have, and who takes turns."""

from typing import Any

import pytest

from flotilla.importers.build import Imported
from flotilla.importers.parameter import Verdict
from tests.unit.importers.sources import BASES, import_flat

ACTOR = "actor_rollout_ref.actor"
TRAIN = "actor_train.device_mapping"
INFER = "actor_infer.device_mapping"


def imported(system: str, values: dict[str, Any]) -> Imported:
    found = import_flat(system, {**BASES[system], **values})
    assert found.spec is not None, found.report.render()
    return found


@pytest.mark.parametrize(
    ("system", "values", "expected"),
    [
        ("verl", {"trainer.n_gpus_per_node": 8}, (8, 8, 1, "time")),
        ("verl", {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2}, (8, 16, 2, "time")),
        ("verl", {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 4}, (1, 4, 4, "time")),
        ("verl", {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 64}, (8, 512, 64, "time")),
        ("verl", {"trainer.n_gpus_per_node": 8, "trainer.device": "cuda"}, (8, 8, 1, "none")),
        ("verl", {"trainer.n_gpus_per_node": 1}, ("auto", 1, 1, "none")),
        ("openrlhf", {"--actor_num_gpus_per_node": 4}, (4, 4, 1, "none")),
        ("openrlhf", {"--actor_num_gpus_per_node": 4, "--actor_num_nodes": 2}, (4, 8, 2, "none")),
        (
            "openrlhf",
            {"--actor_num_gpus_per_node": 4, "--colocate_all_models": True, "--vllm_enable_sleep": True},
            (4, 4, 1, "time"),
        ),
        (
            "openrlhf",
            {
                "--actor_num_gpus_per_node": 4,
                "--actor_num_nodes": 2,
                "--colocate_all_models": True,
                "--vllm_enable_sleep": True,
            },
            (4, 8, 2, "time"),
        ),
        ("roll", {TRAIN: "list(range(0,16))", INFER: "list(range(0,16))"}, (8, 16, 2, "time")),
        ("roll", {TRAIN: "list(range(0,4))"}, (4, 4, 1, "none")),
        ("roll", {TRAIN: "list(range(0,4))", INFER: "list(range(4,8))"}, (4, 4, 1, "none")),
        ("roll", {TRAIN: "list(range(0,4))", INFER: "list(range(2,6))"}, (4, 4, 1, "time")),
        ("roll", {TRAIN: "list(range(0,16))"}, (8, 16, 2, "none")),
        ("roll", {TRAIN: "list(range(0,4))", "num_gpus_per_node": 2}, (2, 4, 2, "none")),
    ],
    ids=str,
)
def test_devices_become_what_the_trainer_must_have(
    system: str, values: dict[str, Any], expected: tuple[Any, int, int, str]
) -> None:
    found = imported(system, values)

    spec = found.spec
    assert spec is not None
    resources, parallelism = spec.resources, spec.parallelism
    assert (resources.trainer.devices, parallelism.ranks, parallelism.nodes, resources.sharing.value) == expected


@pytest.mark.parametrize(
    ("system", "values", "name"),
    [
        ("verl", {"trainer.n_gpus_per_node": 8, "trainer.device": "cpu"}, "trainer.n_gpus_per_node"),
        ("verl", {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 1000}, "trainer.n_gpus_per_node"),
        ("openrlhf", {"--actor_num_gpus_per_node": 8, "--actor_num_nodes": 1000}, "--actor_num_gpus_per_node"),
        ("openrlhf", {"--actor_num_gpus_per_node": 8000}, "--actor_num_gpus_per_node"),
        ("roll", {TRAIN: "list(range(0,4))", INFER: "list(range(0,4))", "actor_infer.num_gpus_per_worker": 2}, INFER),
    ],
    ids=str,
)
def test_where_the_fleet_cannot_have_them_they_are_unsupported(system: str, values: dict[str, Any], name: str) -> None:
    report = imported(system, values).report

    assert next(entry.verdict for entry in report.entries if entry.name == name) is Verdict.UNSUPPORTED


def test_engines_that_take_turns_with_trainers_are_on_each_of_their_machines() -> None:
    spec = imported("verl", {"trainer.n_gpus_per_node": 8, "trainer.nnodes": 4}).spec

    assert spec is not None and spec.resources.rollouts.min == 4


def test_engines_of_one_device_each_are_as_many_rollouts() -> None:
    spec = imported("roll", {TRAIN: "list(range(0,4))", INFER: "list(range(4,8))"}).spec

    assert spec is not None and spec.resources.rollouts.min == 4


@pytest.mark.parametrize(
    ("system", "values", "field", "expected"),
    [
        ("openrlhf", {"--actor_num_gpus_per_node": 4, "--ds_tensor_parallel_size": 2}, "tensor_parallel", 2),
        ("openrlhf", {"--actor_num_gpus_per_node": 4, "--ring_attn_size": 2}, "sequence_parallel", 2),
        ("roll", {TRAIN: "list(range(0,4))", "strategy_config.tensor_model_parallel_size": 2}, "tensor_parallel", 2),
        ("roll", {TRAIN: "list(range(0,4))", "strategy_config.context_parallel_size": 2}, "sequence_parallel", 2),
        ("verl", {"trainer.n_gpus_per_node": 4, f"{ACTOR}.fsdp_config.fsdp_size": 2}, "replicas", 2),
    ],
    ids=str,
)
def test_what_ranks_divide_comes_along(system: str, values: dict[str, Any], field: str, expected: int) -> None:
    spec = imported(system, values).spec

    assert spec is not None and getattr(spec.parallelism, field) == expected


def test_a_size_that_does_not_divide_the_devices_is_unsupported_by_name() -> None:
    report = imported("openrlhf", {"--actor_num_gpus_per_node": 4, "--ring_attn_size": 3}).report

    assert [(entry.name, "does not divide the 4 GPUs" in entry.detail) for entry in report.unsupported] == [
        ("--ring_attn_size", True)
    ]
