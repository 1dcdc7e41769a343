"""The trainer's passes of one sequence have the bits of an engine that scores whole answers."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flotilla.services.rollout.engines.decoders.generic import WholeScorer
from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.models.log_probs import Policy
from tests.unit.trainer.builders import a_model, uneven_groups

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_gradient_each_token_has_the_bits_of_the_engines_score(temperature: float) -> None:
    groups, model = uneven_groups(), a_model()
    scorer = WholeScorer(copy.deepcopy(model).requires_grad_(False))
    policy = Policy(model, temperature=temperature, is_exact=True)
    batch = make_batch(groups)

    found = torch.zeros(len(batch.positions))
    for micro in make_micro_batches(batch, range(batch.num_sequences), RowRules("padded"), max_tokens=1, device=CPU):
        assert len(micro.members) == 1
        log_probs = policy.statistics(micro.inputs, with_entropy=True).log_probs
        assert log_probs.requires_grad
        found[micro.tokens] = micro.spread(log_probs.detach())

    expected = []
    for trajectory in (each for group in groups for each in group.trajectories):
        first = int(trajectory.loss_mask.argmax())
        answer = trajectory.token_ids[first:]
        scores = scorer.log_probs(trajectory.token_ids[:first].tolist(), answer, temperature)
        expected.append(scores[trajectory.loss_mask[first:].astype(bool)])
    assert found[batch.sequences.response_mask].numpy().tobytes() == np.concatenate(expected).tobytes()
