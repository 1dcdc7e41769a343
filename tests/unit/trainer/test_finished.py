"""Learning from finished answers gives the gradient of the loss as it is written down, however a mini-batch is cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from flotilla.services.trainer.learning.finished import FinishedLearner
from flotilla.services.trainer.learning.labelled import KtoLearner
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


LABELS = (1.0, 0.0, 1.0, 1.0)


def labelled() -> list[Group]:
    """Make answers of which one is undesirable; prompts differ in length."""
    members = [a_trajectory(3 + n, turns, LABELS[n], seed=n, version=NO_VERSION) for n, turns in enumerate(TURNS)]
    return [Group(a_task(n, group_size=1), (member,)) for n, member in enumerate(members)]


def of_other_prompt(groups: list[Group], number: int) -> Group:
    """Put the answer to the next prompt behind this one's, as Ethayarajh et al. do."""
    own, other = (groups[n % len(groups)].trajectories[0] for n in (number, number + 1))
    starts = [each.loss_mask.tolist().index(1) for each in (own, other)]
    parts = (own.token_ids[: starts[0]], other.token_ids[starts[1] :])
    masks = (own.loss_mask[: starts[0]], other.loss_mask[starts[1] :])
    ids = np.concatenate(parts)
    joined = replace(own, token_ids=ids, loss_mask=np.concatenate(masks), log_probs=np.zeros(len(ids), np.float32))
    return Group(groups[number].task, (joined,))


def naive_kto(model: Any, *, beta: float, weights: tuple[float, float], reference_point: str = "mismatched") -> Any:
    """Follow the paper's equations in float64, one sequence at a time."""
    reference, groups = a_model(), labelled()

    def ratio(group: Group) -> torch.Tensor:
        with torch.no_grad():
            ref = log_probs_of(reference, group, 0).double().sum()
        return log_probs_of(model, group, 0).double().sum() - ref

    ratios = [ratio(group) for group in groups]
    points = [0.0] * len(groups)
    if reference_point == "mismatched":
        kl = sum(ratio(of_other_prompt(groups, n)).item() for n in range(len(groups))) / len(groups)
        points = [max(kl, 0.0)] * len(groups)
    if reference_point == "matched":
        found = [[r.item() for r, label in zip(ratios, LABELS, strict=True) if label == other] for other in (0.0, 1.0)]
        points = [max(sum(found[int(1 - label)]) / len(found[int(1 - label)]), 0.0) for label in LABELS]
    losses = []
    for value, point, label in zip(ratios, points, LABELS, strict=True):
        sign, weight = (1, weights[0]) if label else (-1, weights[1])
        losses.append(weight * (1 - torch.sigmoid(sign * beta * (value - point))))
    return torch.stack(losses).mean()


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
    "kto": (
        {"kind": "kto", "beta": 0.5, "desirable_weight": 0.7, "undesirable_weight": 2.0},
        lambda model: naive_kto(model, beta=0.5, weights=(0.7, 2.0)),
    ),
    "kto-matched": (
        {"kind": "kto", "beta": 0.5, "reference_point": "matched"},
        lambda model: naive_kto(model, beta=0.5, weights=(1.0, 1.0), reference_point="matched"),
    ),
    "kto-zero": (
        {"kind": "kto", "beta": 0.5, "reference_point": "zero"},
        lambda model: naive_kto(model, beta=0.5, weights=(1.0, 1.0), reference_point="zero"),
    ),
}


ROWS = {"sft": demonstrations, "kto": labelled}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout['packing']}-{layout['micro_batch_tokens']}")
@pytest.mark.parametrize("kind", JOBS)
def test_an_update_is_that_of_the_loss_as_written(kind: str, layout: dict[str, Any]) -> None:
    job, naive = JOBS[kind]
    spec = spec_of(job, **layout)
    groups = ROWS.get(kind.partition("-")[0], pairs)()
    learner = make_learner(spec, LoadedModel(a_model(), Path()), LoadedModel(a_model(), Path()))
    # Two steps: in the first one the policy is the reference, so that beta hardly matters.
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    for step in (1, 2, 3) if kind == "kto" else (1, 2):
        result = learner.train(groups, step)
        expected = naive(model)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert result.metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5, abs=2e-6)

    for name, parameter in model.named_parameters():
        found = dict(learner.loaded.model.named_parameters())[name]
        torch.testing.assert_close(found, parameter, atol=2e-6, rtol=0)


def test_the_reference_point_of_a_mini_batch_moves_the_loss() -> None:
    """Without it the test above could not fail: it must not be clamped to 0, where all forms are the same."""
    model = a_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    losses = {
        point: naive_kto(model, beta=0.5, weights=(1.0, 1.0), reference_point=point).item()
        for point in ("mismatched", "matched", "zero")
    }
    learner = make_learner(
        spec_of({"kind": "kto", "beta": 0.5}), LoadedModel(model, Path()), LoadedModel(a_model(), Path())
    )

    result = learner.train(labelled(), 1)

    assert len({round(value, 3) for value in losses.values()}) == 3, losses
    assert result.metrics["loss/total"] == pytest.approx(losses["mismatched"], rel=1e-5)
    assert result.metrics["preference/reference_point"] > 0.1
    assert result.metrics["preference/desirable_fraction"] == 0.75


@pytest.mark.parametrize(("prompt", "max_tokens", "kept"), [(100, None, 28), (125, 126, 1), (140, 4096, 0)])
def test_a_prompt_with_the_answer_to_another_is_cut_where_the_model_ends(
    prompt: int, max_tokens: int | None, kept: int
) -> None:
    """Of an answer of 120 tokens, by a model of 128."""
    members = [
        a_trajectory(prompt, [9], 1.0, seed=1, version=NO_VERSION),
        a_trajectory(3, [120], 0.0, seed=2, version=NO_VERSION),
    ]
    groups = [Group(a_task(n, group_size=1), (member,)) for n, member in enumerate(members)]
    job = {"kind": "kto", "max_tokens": max_tokens}
    made = make_learner(spec_of(job), LoadedModel(a_model(), Path()), LoadedModel(a_model(), Path()))
    assert isinstance(made, KtoLearner)

    batch = made._batch(groups)

    assert batch.sequences.lengths[1::2].tolist() == [kept, 9]
    assert made.train(groups, 1).metrics["loss/total"] > 0


def a_teacher() -> Qwen3ForCausalLM:
    """Make another architecture than the student's, whose vocabulary is padded."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY + 5,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=12,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def naive_distillation(model: Any, teacher: Any, *, coefficient: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute loss and KL over all tokens of all answers in float64, one sequence at a time."""
    likelihoods, divergences = [], []
    for group in demonstrations():
        [trajectory] = group.trajectories
        ids, mask = torch.tensor(trajectory.token_ids.tolist())[None], torch.tensor(trajectory.loss_mask.tolist())[1:]
        own = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
        theirs = torch.log_softmax(teacher(ids).logits[0, :-1, :VOCABULARY].double(), -1).detach()
        likelihoods.append(own.gather(1, ids[0, 1:, None])[:, 0][mask.bool()])
        divergences.append(functional.kl_div(own, theirs, log_target=True, reduction="none").sum(-1)[mask.bool()])
    divergence = torch.cat(divergences).mean()
    return -(1 - coefficient) * torch.cat(likelihoods).mean() + coefficient * divergence, divergence


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout['packing']}-{layout['micro_batch_tokens']}")
def test_an_update_under_a_teacher_is_that_of_the_loss_as_written(layout: dict[str, Any]) -> None:
    job = {"kind": "sft", "response_column": "answer", "distillation": {"path": "t", "coefficient": 0.4}}
    learner = make_learner(
        spec_of(job, **layout), LoadedModel(a_model(), Path()), teachers=[LoadedModel(a_teacher(), Path())]
    )
    assert isinstance(learner, FinishedLearner)
    model, teacher = a_model(), a_teacher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    for step in (1, 2):
        held_out = learner.measure(demonstrations())
        result = learner.train(demonstrations(), step)
        expected, divergence = naive_distillation(model, teacher, coefficient=0.4)
        optimizer.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert result.metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5)
        assert result.metrics["distillation/kl"] == pytest.approx(divergence.item(), rel=1e-5)
        assert held_out["held_out/loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert held_out["held_out/distillation/kl"] == pytest.approx(divergence.item(), rel=1e-5)

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
