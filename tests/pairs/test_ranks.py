"""Each row of options that ranks share is learned by two ranks, of one host or of two, as by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel, load_model
from flotilla.services.trainer.parallel.ranks import ONE_RANK, MeshShape, Ranks
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import Group
from tests.integration.trainer.ranks import run_ranks, stored
from tests.integration.trainer.test_images_agree import answered
from tests.pairs.covering import Case, Row, covering_rows
from tests.pairs.documents import spec_of
from tests.pairs.table import RANKS, RANKS_REFUSED
from tests.unit.trainer.builders import a_model, uneven_groups
from tests.vision_models import save_vision_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS, RATE = 3, 1e-3
MESHES: Mapping[str, MeshShape] = {
    "shards": MeshShape(2),
    "sequences": MeshShape(2, sequence=2),
    "tensors": MeshShape(1, tensor=2),
}
REWARD: Mapping[str, Any] = {"components": [{"kind": "exact"}]}
SENSITIVE = ("correction/chi2", "grad_norm", "update/")
"""Exponentials of log-ratios, and what the parameters show in any case."""
VALUES = {name: list(values) for name, values in RANKS.items()}
ROWS = covering_rows(VALUES, [tuple(RANKS)], RANKS_REFUSED)
JOBS: list[Case] = [(mesh, hosts) for mesh in MESHES for hosts in VALUES["hosts"]]


@dataclass(frozen=True)
class Pictured:
    """A model that takes pictures, and groups of its own samples."""

    model: Path
    groups: list[Group]


def learned(row: Row, ranks: Ranks | None, pictured: Pictured) -> tuple[Learner, list[dict[str, float]]]:
    """Train some steps on a job, or alone."""
    spec = a_spec(row if ranks is not None else {**row, "mesh": "one"}, pictured.model)
    has_reference, each = row["kl"] != "none", ranks or ONE_RANK
    if row["pictures"] != "none":
        load = partial(load_model, pictured.model, dtype="float32", device=each.device, in_parts=each.is_several)
        learner = Learner(spec, load(), load() if has_reference else None, ranks=each)
    elif ranks is None:
        models = [a_model(), a_model() if has_reference else None]
        learner = Learner(spec, *(None if each is None else LoadedModel(each, Path()) for each in models))  # type: ignore[arg-type]
    else:
        with stored(a_model(), ranks) as policy, stored(a_model() if has_reference else None, ranks) as reference:
            assert policy is not None
            learner = Learner(spec, policy, reference, ranks=ranks)
    groups = pictured.groups if row["pictures"] != "none" else None
    steps = range(1, STEPS + 1)
    return learner, [dict(learner.train(groups or uneven_groups(4, seed=step), step).metrics) for step in steps]


def a_spec(row: Row, pictured: Path) -> ExperimentSpec:
    changes: dict[str, Any] = {"learning_rate": RATE, "epsilon": 1e-6, "steps": STEPS, "groups_per_mini_batch": 2}
    options = {**RANKS, "mesh": {**RANKS["mesh"], "one": {}}}
    model = {} if row["pictures"] == "none" else {"model": {"path": str(pictured)}}
    return spec_of(row, options, {}, optimisation=changes, asynchrony={"require_batches": 2}, reward=REWARD, **model)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def apart(ranks: Ranks, asked: tuple[list[Row], Pictured]) -> list[tuple[str, float, float]]:
    """Train each row on this job and alone; returns the figure that differs most, by how much, and the parameters."""
    found = []
    rows, pictured = asked
    for row in rows:
        several, together = learned(row, ranks, pictured)
        one, alone = learned(row, None, pictured)
        assert len(together[0]) > 5
        differences = {
            f"{name} of step {number + 1}": abs(value - together[number][name]) / max(1.0, abs(value))
            for number, figures in enumerate(alone)
            for name, value in figures.items()
            if not name.startswith(SENSITIVE)
        }
        worst, difference = max(differences.items(), key=lambda pair: pair[1])
        pairs = zip(one.loaded.model.parameters(), several.loaded.model.parameters(), strict=True)
        moved = max(float((first.detach() - whole(second)).abs().max()) for first, second in pairs)
        found.append((worst, difference, moved))
    return found


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Pictured:
    model = save_vision_model(tmp_path_factory.mktemp("pictures"))
    return Pictured(model, answered(model))


@pytest.mark.parametrize(("mesh", "hosts"), JOBS, ids=[" of ".join(job) for job in JOBS])
def test_two_ranks_learn_what_one_learns(mesh: str, hosts: str, pictured: Pictured) -> None:
    rows = [row for row in ROWS if (row["mesh"], row["hosts"]) == (mesh, hosts)]
    assert rows

    found = run_ranks(apart, (rows, pictured), MESHES[mesh], ["one", "other"] if hosts == "two" else None)

    for number, row in enumerate(rows):
        worst, difference, moved = found[0][number]
        print(row, worst, difference, moved)
        assert difference < 1e-3, (row, worst)
        assert moved < 0.05 * RATE, row
