"""Learning from finished answers gives the gradient of the loss as it is written down, however a mini-batch is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from flotilla.services.trainer.learning.opening import make_learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import NO_VERSION, Group
from flotilla.shared.testing.builders import a_task
from tests.unit.trainer.builders import VOCABULARY, a_model, a_spec, a_trajectory

LAYOUTS: list[dict[str, Any]] = [
    {"packing": "padded", "micro_batch_tokens": 100_000},
    {"packing": "packed", "micro_batch_tokens": 64},
    {"packing": "auto", "micro_batch_tokens": 1},
]
TURNS = ([7], [3, 4, 6], [20], [1, 2, 5])


def spec_of(job: dict[str, Any], **optimisation: Any) -> ExperimentSpec:
    settings = {"steps": 5, "groups_per_mini_batch": 4, "learning_rate": 1e-2, "epsilon": 1.0, "max_grad_norm": None}
    document = a_spec().model_dump(mode="json")
    del document["reward"], document["rollout"]
    return a_spec_of(document | {"job": job, "optimisation": settings | optimisation})


def a_spec_of(document: dict[str, Any]) -> ExperimentSpec:
    return ExperimentSpec.model_validate(document)


def demonstrations() -> list[Group]:
    members = [a_trajectory(3, turns, 1.0, seed=n, version=NO_VERSION) for n, turns in enumerate(TURNS)]
    return [Group(a_task(n, group_size=1), (member,)) for n, member in enumerate(members)]


def pairs() -> list[Group]:
    return [
        Group(
            a_task(number, group_size=2),
            (
                a_trajectory(4, turns, 1.0, seed=number, version=NO_VERSION),
                a_trajectory(4, TURNS[number - 1], 0.0, seed=50 + number, version=NO_VERSION),
            ),
        )
        for number, turns in enumerate(TURNS)
    ]


def log_probs_of(model: Any, group: Group, member: int) -> torch.Tensor:
    """Compute the log-probs of the learned tokens, one sequence at a time, without anything of ours."""
    trajectory = group.trajectories[member]
    ids = torch.tensor(trajectory.token_ids.tolist())[None]
    every = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
    found: torch.Tensor = every[torch.tensor(trajectory.loss_mask.tolist()).bool()[1:]]
    return found


def naive_sft(model: Any) -> torch.Tensor:
    found = torch.cat([log_probs_of(model, group, 0) for group in demonstrations()])
    return -found.mean()


def naive_preference(model: Any, *, beta: float, coefficient: float, smoothing: float = 0.0, ipo: bool = False) -> Any:
    reference = a_model()
    losses, chosen_tokens = [], []
    for group in pairs():
        ratios = []
        for member in (0, 1):
            with torch.no_grad():
                ref = log_probs_of(reference, group, member).sum()
            ratios.append(log_probs_of(model, group, member).sum() - ref)
        z = ratios[0] - ratios[1]
        right, wrong = functional.logsigmoid(beta * z), functional.logsigmoid(-beta * z)
        losses.append((z - 1 / (2 * beta)) ** 2 if ipo else -(1 - smoothing) * right - smoothing * wrong)
        chosen_tokens.append(log_probs_of(model, group, 0))
    return torch.stack(losses).mean() - coefficient * torch.cat(chosen_tokens).mean()


JOBS: dict[str, tuple[dict[str, Any], Any]] = {
    "sft": ({"kind": "sft", "response_column": "answer"}, naive_sft),
    "dpo": (
        {"kind": "preference", "loss": {"kind": "dpo", "label_smoothing": 0.2}, "supervised_coefficient": 0.5},
        lambda model: naive_preference(model, beta=0.1, coefficient=0.5, smoothing=0.2),
    ),
    "ipo": (
        {"kind": "preference", "loss": {"kind": "ipo", "beta": 2.0}},
        lambda model: naive_preference(model, beta=2.0, coefficient=0.0, ipo=True),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout['packing']}-{layout['micro_batch_tokens']}")
@pytest.mark.parametrize("kind", JOBS)
def test_an_update_is_that_of_the_loss_as_written(kind: str, layout: dict[str, Any]) -> None:
    job, naive = JOBS[kind]
    spec = spec_of(job, **layout)
    groups = demonstrations() if kind == "sft" else pairs()
    learner = make_learner(spec, LoadedModel(a_model(), Path()), LoadedModel(a_model(), Path()))
    # Two steps: in the first one the policy is the reference, so that beta hardly matters.
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    for step in (1, 2):
        result = learner.train(groups, step)
        expected = naive(model)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert result.metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5, abs=2e-6)

    for name, parameter in model.named_parameters():
        found = dict(learner.loaded.model.named_parameters())[name]
        torch.testing.assert_close(found, parameter, atol=2e-6, rtol=0)


def a_classifier() -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return Qwen3ForSequenceClassification(config).eval()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout['packing']}-{layout['micro_batch_tokens']}")
def test_a_reward_models_update_is_bradley_terrys(layout: dict[str, Any]) -> None:
    learner = make_learner(spec_of({"kind": "reward_model"}, **layout), LoadedModel(a_classifier(), Path()))
    model = a_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    result = learner.train(pairs(), 1)

    def score(group: Group, member: int) -> torch.Tensor:
        ids = torch.tensor(group.trajectories[member].token_ids.tolist())[None]
        found: torch.Tensor = model.score(model.model(ids).last_hidden_state)[0, -1, 0]
        return found

    losses = [-functional.logsigmoid(score(group, 0) - score(group, 1)) for group in pairs()]
    expected = torch.stack(losses).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert result.metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5, abs=2e-6)
    for name, parameter in model.named_parameters():
        found = dict(learner.loaded.model.named_parameters())[name]
        torch.testing.assert_close(found, parameter, atol=2e-6, rtol=0)
