"""Activations that are computed twice change no figure, and are not kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.layers import recompute_activations
from flotilla.shared.errors import ModelError
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups


def kept_bytes(run: Callable[[], Any]) -> int:
    """Count what a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_step_is_the_same_to_the_bit(advantage: str) -> None:
    found = []
    for is_on in (False, True):
        spec = a_spec(
            algorithm={"advantage": {"kind": advantage}},
            optimisation={"steps": 2, "groups_per_mini_batch": 2, "activation_checkpointing": is_on},
            asynchrony={"require_batches": 2},
        )
        learner = Learner(spec, LoadedModel(a_model(), Path()))
        metrics = dict(learner.train(uneven_groups(), 1).metrics)
        found.append((metrics, learner.weights.copies(as_published=False)["float32"], learner.weights.layout))

    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2], "the names of the weights stay"


def test_less_is_kept_for_the_backward_pass() -> None:
    model = a_model(num_hidden_layers=6, tie_word_embeddings=False)
    ids = torch.arange(30)[None].repeat(8, 1)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    plain = kept_bytes(lambda: model(input_ids=ids, use_cache=False)) - weights

    recompute_activations(model)

    assert kept_bytes(lambda: model(input_ids=ids, use_cache=False)) < 0.5 * (plain + weights)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear does not declare"):
        recompute_activations(nn.Linear(2, 2))
