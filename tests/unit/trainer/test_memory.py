"""What a learner has between two steps leaves its device as a whole, whatever the learner keeps, and comes back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.memory import LearnerMemory
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups

LEAST = 2000
"""Bytes: less than a matrix here takes, and more than the hidden states of a probe."""

KEEPING: dict[str, dict[str, Any]] = {
    "policy": {},
    "average": {"optimisation": {"average_decay": 0.9}},
    "critic": {"algorithm": {"advantage": {"kind": "gae"}}},
    "critic and average": {
        "algorithm": {"advantage": {"kind": "gae"}, "value_loss": {"warmup_steps": 1}},
        "optimisation": {"average_decay": 0.9},
    },
    "reference": {"algorithm": {"kl": {"placement": "loss"}}},
    "versions and average": {
        "algorithm": {"old_log_probs": "recompute_at_version"},
        "optimisation": {"average_decay": 0.9},
    },
    "adapters and average": {"model": {"lora": {"rank": 64}}, "optimisation": {"average_decay": 0.9}},
}


def a_learner(kept: dict[str, dict[str, Any]], dtype: torch.dtype) -> Learner:
    optimisation = {"groups_per_mini_batch": 1, "learning_rate": 1e-2} | kept.get("optimisation", {})
    spec = a_spec(**(kept | {"optimisation": optimisation}))
    reference = LoadedModel(a_model(), cast(Any, None)) if spec.needs_reference and spec.model.lora is None else None
    return Learner(spec, LoadedModel(a_model().to(dtype), cast(Any, None)), reference)


OURS = ("flotilla.services.", "flotilla.shared.weights.")


def held_by(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Find the tensors that an object of ours holds, at any depth."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from (*thing.parameters(), *thing.buffers())
    elif isinstance(thing, torch.optim.Optimizer):
        yield from held_by(thing.state, seen)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from held_by(key, seen)
            yield from held_by(value, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        for each in thing:
            yield from held_by(each, seen)
    elif isinstance(thing, Policy) or type(thing).__module__.startswith(OURS):
        yield from held_by(vars(thing) if hasattr(thing, "__dict__") else (), seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", KEEPING.values(), ids=KEEPING)
def test_nothing_large_stays_behind_and_training_goes_on_as_without(
    kept: dict[str, dict[str, Any]], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.services.trainer.models.offloading.LEAST_BYTES", LEAST)
    moved, usual = a_learner(kept, dtype), a_learner(kept, dtype)
    for learner in (moved, usual):
        learner.train(uneven_groups(1, seed=1), 1)
    storages = [each.untyped_storage() for each in held_by(moved, set())]
    assert sum(each.nbytes() for each in storages) > 4 * 32 * 32
    memory = LearnerMemory(moved, tmp_path)

    memory.offload()

    assert not [each.nbytes() for each in storages if each.nbytes() >= LEAST]
    memory.reload()
    results = [learner.train(uneven_groups(1, seed=2), 2).metrics for learner in (moved, usual)]
    assert results[0] == results[1]
    averages = [{} if each.average is None else each.average.state() for each in (moved, usual)]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[1])
