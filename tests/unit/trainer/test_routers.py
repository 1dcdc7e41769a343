"""Routers' losses: the gradient of a mini-batch is that of its loss and of theirs, as written down."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flotilla.services.trainer.data.packing import ModelInput
from flotilla.services.trainer.learning.opening import make_learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.routers import RouterLosses
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.config.sections.optimisation import RouterConfig
from flotilla.shared.errors import ModelError
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import a_group, a_model, a_spec
from tests.unit.trainer.test_finished import JOBS, demonstrations, naive_sft, pairs, spec_of

SFT: dict[str, Any] = {"kind": "sft", "response_column": "answer"}
TOP, EXPERTS = 2, 4


def logits_of(model: Any) -> tuple[torch.Tensor, ...]:
    """Compute the routers' logits of every token, one sequence at a time: [tokens, E] of each layer."""
    sequences = [torch.tensor(group.trajectories[0].token_ids.tolist())[None] for group in demonstrations()]
    found = [model(ids, output_router_logits=True).router_logits for ids in sequences]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def naive_balance(model: Any, scope: str) -> torch.Tensor:
    logits = logits_of(model)
    if scope == "model":
        return load_balancing_loss_func(logits, EXPERTS, TOP)  # type: ignore[return-value]
    losses = []
    for each in logits:
        probabilities = each.float().softmax(-1)
        chosen = torch.nn.functional.one_hot(probabilities.topk(TOP).indices, EXPERTS).sum(1).float()
        losses.append(EXPERTS / TOP * (chosen.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(losses).sum()


def naive_z(model: Any) -> torch.Tensor:
    return torch.stack([each.float().logsumexp(-1).square().mean() for each in logits_of(model)]).sum()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("scope", "balance", "z"), [("layer", 0.5, 0.0), ("model", 0.5, 0.0), ("layer", 0.0, 0.1), ("layer", 0.3, 0.2)]
)
def test_an_update_is_that_of_the_loss_and_the_routers(
    name: str, packing: str, checkpointing: bool, scope: str, balance: float, z: float
) -> None:
    router = {"balance": balance, "z": z, "scope": scope}
    spec = spec_of(SFT, packing=packing, micro_batch_tokens=100_000, router=router,
                   activation_checkpointing=checkpointing)  # fmt: skip
    learner = make_learner(spec, LoadedModel(ARCHITECTURES[name](), Path()))
    model = ARCHITECTURES[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    result = learner.train(demonstrations(), 1)

    balanced, squares = naive_balance(model, scope), naive_z(model)
    (naive_sft(model) + balance * balanced + z * squares).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert result.metrics["router/balance"] == pytest.approx(balanced.item(), rel=1e-5)
    assert result.metrics["router/z"] == pytest.approx(squares.item() / 2, rel=1e-5)
    for key, parameter in model.named_parameters():
        found = dict(learner.loaded.model.named_parameters())[key]
        torch.testing.assert_close(found, parameter, atol=2e-6, rtol=0)


def test_passes_of_a_mini_batch_are_averaged() -> None:
    one, many = (
        make_learner(
            spec_of(SFT, micro_batch_tokens=tokens, router={"balance": 1.0}),
            LoadedModel(ARCHITECTURES["Mixtral"](), Path()),
        ).train(demonstrations(), 1)
        for tokens in (100_000, 1)
    )

    # Balance of few tokens is worse; added up over four passes it would be about four times that of one.
    assert one.metrics["router/balance"] < many.metrics["router/balance"] < 2 * one.metrics["router/balance"]


def test_figures_of_ranks_add_up_to_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _figures(0, 1, monkeypatch)
    shares = [_figures(rank, 2, monkeypatch) for rank in range(2)]

    for name in ("router/balance", "router/z"):
        assert sum(each[name] for each in shares) == pytest.approx(whole[name], rel=0.2)


def _figures(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Train a mini-batch as one of some ranks, and return what it alone reports."""
    monkeypatch.setattr(Ranks, "data_size", size)
    monkeypatch.setattr(Ranks, "data_rank", rank)
    spec = spec_of(SFT, micro_batch_tokens=100_000, router={"balance": 1.0, "z": 0.1})
    return make_learner(spec, LoadedModel(ARCHITECTURES["Mixtral"](), Path())).train(demonstrations(), 1).metrics


def test_pictures_tokens_count_as_any_others() -> None:
    positions = torch.tensor([[[0, 1, 1, 1, 1, 3, 0, 0]], [[0, 1, 1, 2, 2, 3, 0, 0]], [[0, 1, 2, 1, 2, 3, 0, 0]]])
    model = ARCHITECTURES["Mixtral"]()
    losses = RouterLosses(model, RouterConfig(balance=1.0, z=0.1))
    ids = torch.randint(0, 20, (1, 8))
    inputs = ModelInput(ids, positions, None, torch.zeros(1, dtype=torch.int64), ids[0, :1])

    with losses.counting(inputs, 1.0):
        model(input_ids=ids)

    logits = model(input_ids=ids, output_router_logits=True).router_logits
    square = torch.stack([each[:6].float().logsumexp(-1).square().mean() for each in logits]).mean()
    assert losses.metrics(1)["router/z"].total.item() == pytest.approx(square.item(), rel=1e-5)


def test_answers_without_an_advantage_balance_experts_all_the_same() -> None:
    spec = a_spec(optimisation={"router": {"balance": 1.0}})
    learner = make_learner(spec, LoadedModel(ARCHITECTURES["Mixtral"](), Path()))
    router = dict(learner.loaded.model.named_parameters())["model.layers.0.mlp.gate.weight"]
    before = router.detach().clone()

    metrics = learner.train([a_group([1.0, 1.0, 1.0, 1.0])], 1).metrics

    assert metrics["router/balance"] >= 1
    assert not torch.equal(router, before)


def test_pairs_move_routers_too() -> None:
    found = []
    for router in (None, {"balance": 1.0}):
        spec = spec_of(JOBS["dpo"][0], router=router)
        learner = make_learner(spec, *(LoadedModel(ARCHITECTURES["Mixtral"](), Path()) for _ in range(2)))
        learner.train(pairs(), 1)
        found.append(dict(learner.loaded.model.named_parameters())["model.layers.0.mlp.gate.weight"].detach().clone())

    assert not torch.equal(*found)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ModelError, match="has no routers"):
        make_learner(spec_of(SFT, router={"balance": 0.1}), LoadedModel(a_model(), Path()))
