"""What is learned of prompts with pictures, and published, does not depend on the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import load_model
from flotilla.services.trainer.parallel.ranks import ONE_RANK, MeshShape, Ranks
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import Group
from tests.integration.trainer.ranks import TWO_RANKS, image_of_one, image_of_ranks, run_ranks
from tests.integration.trainer.test_images_agree import CPU, a_spec, answered
from tests.vision_models import KINDS, is_of_tower, save_vision_model

pytestmark = [pytest.mark.timeout(900)]

MICRO_BATCH_TOKENS = 64
CLOSE = 1e-5
MIXTURE = "qwen3_vl_moe"


@dataclass(frozen=True)
class Case:
    """What is trained, from samples of its own first weights, and with which sections."""

    model: Path
    groups: list[Group]
    sections: dict[str, Any]
    axes: dict[str, Any] = field(default_factory=dict)


def spec_of(case: Case, ranks: Ranks) -> ExperimentSpec:
    written = a_spec(case.model, **case.sections.get("model", {})).model_dump(mode="json", exclude_unset=True)
    written["optimisation"] = {
        "steps": 3,
        "groups_per_mini_batch": 2,
        "learning_rate": 1e-2,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
        # Gradients that differ by rounding make steps that do.
        "epsilon": 1e-3,
    }
    divided = {"ranks": ranks.size} | case.axes if ranks.is_several else {}
    sections = {name: each for name, each in case.sections.items() if name != "model"}
    return validate_spec(written | sections | {"asynchrony": {"require_batches": 2}, "parallelism": divided})


def a_learner(case: Case, ranks: Ranks) -> Learner:
    spec = spec_of(case, ranks)
    taught = spec.algorithm.distillation
    paths = [case.model, case.model, *([] if taught is None else [Path(str(taught.path))])]
    policy, reference, *teachers = (
        load_model(path, dtype="float32", device=CPU, in_parts=ranks.is_several) for path in paths
    )
    with_reference = spec.needs_reference and spec.model.lora is None
    return Learner(spec, policy, reference if with_reference else None, teachers, ranks=ranks)


def steps_of(case: Case) -> list[list[Group]]:
    """List the groups of each step: all, those without a picture, and such that one answer alone has some."""
    bare = [group for group in case.groups if not group.task.images]
    first = case.groups[0]
    assert first.task.images
    return [case.groups, bare, [replace(first, trajectories=first.trajectories[:1]), *bare]]


def learned(case: Case, ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, Tensor], Learner]:
    """Train; returns figures and what is published."""
    learner = a_learner(case, ranks)
    figures = []
    for step, groups in enumerate(steps_of(case), 1):
        result = learner.train(groups, step)
        norms = {f"norm {number}": each.grad_norm for number, each in enumerate(result.updates)}
        figures.append(dict(result.metrics) | norms)
    image = image_of_ranks(learner.weights, ranks) if ranks.is_several else image_of_one(learner.weights)
    return figures, image, learner


def equality(ranks: Ranks, cases: dict[str, Case]) -> dict[str, Any]:
    """Train each case on this job, and alone; returns how far apart they end."""
    found = {}
    for name, case in cases.items():
        figures, image, learner = learned(case, ranks)
        expected, whole, _ = learned(case, ONE_RANK)
        first = image_of_one(a_learner(case, ONE_RANK).weights)
        assert image.keys() == whole.keys() == first.keys()
        apart = {
            f"{key} of step {step + 1}": abs(value - figures[step][key]) / max(1.0, abs(value))
            for step, of_step in enumerate(expected)
            for key, value in of_step.items()
        }
        found[name] = {
            "figures": max(apart.items(), key=lambda pair: pair[1]),
            "weights": max(float((image[key] - whole[key]).abs().max()) for key in whole),
            "has_tower_moved": any(is_of_tower(key) and not torch.equal(whole[key], first[key]) for key in whole),
            "blind": num_blind(learner, steps_of(case)[-1], ranks),
            "divided": sum(is_divided(each) for each in learner.loaded.model.parameters()),
        }
    return found


def is_divided(weight: Tensor) -> bool:
    """Whether ranks compute with parts of it, beside those that FSDP gathers."""
    return isinstance(weight, DTensor) and bool({"tensor", "expert"} & {*(weight.device_mesh.mesh_dim_names or ())})


def num_blind(learner: Learner, groups: Sequence[Group], ranks: Ranks) -> int:
    """Count passes of all ranks whose rows have no picture, while another rank's have some."""
    batch = make_batch(groups, processor=learner.processor)
    passes = learner._cut_of(batch, range(batch.num_sequences))(MICRO_BATCH_TOKENS)
    shown = [micro.inputs.images for micro in passes]
    return sum(
        int(told)
        for told in ranks.gather(str(sum(each is not None and not len(each.places) for each in shown)).encode())
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {}
    kl = {"kl": {"placement": "loss"}, "old_log_probs": "recompute"}
    for kind in (*KINDS[2:], *KINDS[:2]):
        folder = save_vision_model(tmp_path_factory.mktemp("model"), kind)
        groups = answered(folder)
        for tower in ("frozen", "trained"):
            sections = {"model": {"vision_tower": tower}, "algorithm": kl}
            found[f"{kind}, {tower}"] = Case(folder, groups, sections)
    teacher = save_vision_model(tmp_path_factory.mktemp("teacher"), KINDS[1], seed=7, hidden=48)
    taught = {"distillation": {"path": str(teacher), "coefficient": 0.5}}
    found["a teacher"] = Case(folder, groups, {"algorithm": taught})
    for tower in ("frozen", "trained"):
        sections = {"model": {"vision_tower": tower}, "algorithm": {"advantage": {"kind": "gae"}}}
        found[f"a critic, {tower}"] = Case(folder, groups, sections)
    found["a critic, divided otherwise"] = replace(found["a critic, trained"], axes={"critic": {"tensor_parallel": 2}})
    lora = {"lora": {"rank": 4}, "vision_tower": "trained"}
    found["adapters in the tower"] = Case(folder, groups, {"model": lora, "algorithm": kl})
    folder = save_vision_model(tmp_path_factory.mktemp("model"), MIXTURE)
    groups = answered(folder)
    for tower in ("frozen", "trained"):
        found[f"{MIXTURE}, {tower}"] = Case(folder, groups, {"model": {"vision_tower": tower}, "algorithm": kl})
    return found


def check_alike(first: dict[str, Any], *, are_some_blind: bool = True) -> None:
    for name, found in first.items():
        assert found["figures"][1] < CLOSE, (name, found)
        assert found["weights"] < CLOSE, (name, found)
        assert found["blind"] > 0 or not are_some_blind, (name, found)
        assert found["has_tower_moved"] == ("trained" in name or "adapters" in name or "otherwise" in name), name


@pytest.mark.parametrize("shape", [TWO_RANKS, pytest.param(MeshShape(2, replicate=2), marks=pytest.mark.long)], ids=str)
def test_ranks_learn_of_pictures_what_one_learns(cases: dict[str, Case], shape: MeshShape) -> None:
    axes = {"replicas": shape.replicate}
    chosen = {name: replace(case, axes=axes | case.axes) for name, case in cases.items() if MIXTURE not in name}

    first, *_ = run_ranks(equality, chosen, shape)

    check_alike(first)


@pytest.mark.parametrize(
    ("axis", "shape", "names"),
    [
        (
            "sequence_parallel",
            MeshShape(2, sequence=2),
            (*(f"{kind}, trained" for kind in KINDS), "a critic, trained", "a teacher", "adapters in the tower"),
        ),
        (
            "tensor_parallel",
            MeshShape(1, tensor=2),
            (*(f"{kind}, trained" for kind in KINDS), "a critic, trained", f"{MIXTURE}, trained"),
        ),
        ("expert_parallel", MeshShape(2, expert=2), (f"{MIXTURE}, frozen", f"{MIXTURE}, trained")),
    ],
    ids=["sequences", "tensors", "experts"],
)
def test_ranks_that_share_rows_layers_or_experts_learn_of_pictures_what_one_learns(
    cases: dict[str, Case], axis: str, shape: MeshShape, names: tuple[str, ...]
) -> None:
    first, *_ = run_ranks(equality, {name: replace(cases[name], axes={axis: 2}) for name in names}, shape)

    check_alike(first, are_some_blind=axis == "expert_parallel")
    assert all((each["divided"] > 0) is (axis != "sequence_parallel") for each in first.values())
