"""Frozen weights keep their bits, and have neither gradients nor optimiser state."""

from pathlib import Path

import pytest
import torch

from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.errors import InvalidSpec, ModelError
from tests.unit.trainer.builders import a_model, a_spec, uneven_groups


def learner(freeze: list[str]) -> Learner:
    optimisation = {"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "freeze": freeze}
    return Learner(a_spec(optimisation=optimisation), LoadedModel(a_model(), Path()))


def test_frozen_weights_keep_their_bits_and_others_are_trained() -> None:
    trained = learner(["model.embed_tokens.*", "*.layers.0.*"])

    trained.train(uneven_groups(2), 1)

    before = dict(a_model().named_parameters())
    moved = {name for name, value in trained.loaded.model.named_parameters() if not torch.equal(value, before[name])}
    others = {name for name in before if not name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert moved == others
    assert {name.partition("/")[2] for name in trained.optimizer.state()} == others


def test_the_other_name_of_a_tied_weight_freezes_it() -> None:
    names = {name for name, value in learner(["lm_head.*"]).loaded.model.named_parameters() if not value.requires_grad}

    assert names == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("pattern", "reason"), [("visual.*", "no weight of the model is called 'visual"), ("*", "nothing is left to train")]
)
def test_a_pattern_that_means_nothing_or_everything_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        learner([pattern])


def test_nothing_is_frozen_beside_adapters() -> None:
    with pytest.raises(InvalidSpec, match="freeze has no effect while"):
        a_spec(model={"path": "/nowhere", "lora": {"rank": 2}}, optimisation={"steps": 1, "freeze": ["a"]})
