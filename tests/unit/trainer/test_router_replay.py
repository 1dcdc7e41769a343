"""The trainer computes tokens with the experts that were recorded: the engine's, or its own of before the updates."""

import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flotilla.services.trainer.data.batch import experts_of, make_batch
from flotilla.services.trainer.data.micro_batch import RowRules, make_micro_batches
from flotilla.services.trainer.data.source import Requirements, find_problem
from flotilla.services.trainer.learning.learner import Learner, StepResult
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.errors import DataError, InvalidSpec
from flotilla.shared.models.routers import Routing
from flotilla.shared.schemas.routing import RoutedExperts, RoutingSizes
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.schemas.turns import FinishReason, Turn
from flotilla.shared.streams.hop import Resolution
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.unit.trainer.builders import VOCABULARY, a_group, a_spec, uneven_groups

SIZES = RoutingSizes(2, 2, 4)


def a_mixture(**config: Any) -> nn.Module:
    return ARCHITECTURES["Qwen3-MoE"](**config)


def chosen_of(model: nn.Module, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Record what a model chooses for tokens by itself: [T, layers, top_k]."""
    logits = model(input_ids=torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
    found: np.ndarray[Any, Any] = torch.stack([each.topk(2).indices for each in logits], 1).numpy()
    return found


def scored(model: nn.Module, trajectory: Trajectory, told: RoutedExperts | None) -> torch.Tensor:
    """Compute log-probs [T - 1] of a trajectory's tokens in one plain pass, told what to choose."""
    routing = Routing(model)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    experts = None
    if told is not None:
        last = np.full((1, 2, 2), -1)
        experts = torch.from_numpy(np.concatenate([told.ids().astype(np.int16), last.astype(np.int16)]))[None]
    with torch.no_grad(), routing.replaying(experts):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found


def routed(groups: Sequence[Group], *, seed: int = 0) -> list[Group]:
    """Give trajectories records as no model here would make them; the members of a group share that of their prompt."""
    found = []
    for group in groups:
        generator = np.random.default_rng([seed, group.task.group_id])
        drawn = generator.random((200, 2, 4)).argsort(-1)[..., :2]
        members = []
        for number, each in enumerate(group.trajectories):
            prompt = int(np.flatnonzero(each.loss_mask)[0])
            ids = drawn[: len(each.token_ids) - 1].copy()
            ids[prompt:] = np.roll(drawn, number, axis=0)[prompt : len(ids)]
            members.append(replace(each, experts=RoutedExperts.of(ids, 4)))
        found.append(Group(group.task, tuple(members)))
    return found


def sampled_by(model: nn.Module, groups: Sequence[Group]) -> list[Group]:
    """Give trajectories the log-probs that a model with their records gives: what an engine would have recorded."""
    found = []
    for group in groups:
        members = []
        for each in group.trajectories:
            log_probs = np.concatenate([[0.0], scored(model, each, each.experts).numpy()]).astype(np.float32)
            members.append(replace(each, log_probs=np.where(each.loss_mask == 1, log_probs, 0).astype(np.float32)))
        found.append(Group(group.task, tuple(members)))
    return found


def a_learner(mode: str | None, **sections: Any) -> Learner:
    algorithm = {"router_replay": mode} | sections.pop("algorithm", {})
    spec = a_spec(algorithm=algorithm, **sections)
    return Learner(spec, LoadedModel(a_mixture(), Path("/nowhere")))


def step(mode: str | None, groups: Sequence[Group], **options: Any) -> tuple[StepResult, Learner]:
    learner = a_learner(mode, **options)
    return learner.train(groups, 1), learner


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [each.detach().clone() for each in learner.policy.model.parameters()]


RECOMPUTED: dict[str, Any] = {"algorithm": {"old_log_probs": "recompute"}}


@pytest.mark.parametrize("packing", ["packed", "padded", "auto"])
@pytest.mark.parametrize("prompt", [0, 60])
def test_with_the_engines_experts_log_probs_are_the_engines(packing: str, prompt: int) -> None:
    groups = sampled_by(a_mixture(), routed(uneven_groups(prompt=prompt)))
    options: Any = {**RECOMPUTED, "optimisation": {"packing": packing}}

    replayed, _ = step("R3", groups, **options)
    own, _ = step(None, groups, **options)

    assert replayed.metrics["correction/probability_difference"] < 1e-5
    assert abs(replayed.metrics["correction/kl"]) < 1e-5
    assert own.metrics["correction/probability_difference"] > 1e-3
    assert replayed.metrics["router/disagreement"] > 0.5
    assert "router/disagreement" not in own.metrics


def test_routers_that_agree_are_told_nothing_new() -> None:
    groups = []
    for group in uneven_groups():
        members = [
            replace(each, experts=RoutedExperts.of(chosen_of(a_mixture(), each.token_ids.tolist())[:-1], 4))
            for each in group.trajectories
        ]
        groups.append(Group(group.task, tuple(members)))

    replayed, one = step("R3", groups)
    own, other = step(None, groups)

    assert replayed.metrics["router/disagreement"] == 0
    assert replayed.metrics["loss/total"] == pytest.approx(own.metrics["loss/total"], abs=1e-6)
    for ours, theirs in zip(weights_of(one), weights_of(other), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_rows_that_share_a_prompt_give_the_gradient_of_rows_that_do_not() -> None:
    groups = routed(uneven_groups(prompt=60))

    _, packed = step("R3", groups, optimisation={"packing": "auto"})
    _, padded = step("R3", groups, optimisation={"packing": "padded"})

    for ours, theirs in zip(weights_of(packed), weights_of(padded), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_prompts_with_other_experts_are_not_computed_together() -> None:
    groups = routed(uneven_groups(1, prompt=60))
    first = groups[0].trajectories[0]
    assert first.experts is not None
    ids = first.experts.ids().copy()
    ids[3] = [[0, 1], [0, 1]] if ids[3].tolist() != [[0, 1], [0, 1]] else [[2, 3], [2, 3]]
    other = replace(first, experts=RoutedExperts.of(ids, 4))
    apart = [Group(groups[0].task, (other, *groups[0].trajectories[1:]))]

    assert _sharing(groups) == 3
    assert _sharing(apart) == 2
    found, _ = step("R3", sampled_by(a_mixture(), apart), **RECOMPUTED)
    assert found.metrics["correction/probability_difference"] < 1e-5


def _sharing(groups: Sequence[Group]) -> int:
    """Count the sequences that stand behind another one's prompt."""
    batch = make_batch(groups, replays_engine=True)
    rows = RowRules("auto", shares_prompts=True, attends_apart=True)
    made = make_micro_batches(batch, range(4), rows, max_tokens=8192, device=torch.device("cpu"))
    return sum(len(micro.layout.shared) for micro in made)


def test_a_layer_that_is_computed_twice_is_told_twice() -> None:
    groups = routed(uneven_groups())

    _, once = step("R3", groups)
    _, twice = step("R3", groups, optimisation={"activation_checkpointing": True})

    for ours, theirs in zip(weights_of(once), weights_of(twice), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_r2_holds_updates_to_the_experts_of_the_pass_before_them() -> None:
    options: Any = {
        **RECOMPUTED,
        "optimisation": {"learning_rate": 3e-2, "epochs_per_step": 4},
    }

    held, _ = step("R2", uneven_groups(), **options)
    free, _ = step(None, uneven_groups(), **options)
    first, _ = step("R2", uneven_groups(), **RECOMPUTED)

    assert first.metrics["router/disagreement"] == 0
    assert held.metrics["router/disagreement"] > 0
    assert held.metrics["ratio/mean"] != pytest.approx(free.metrics["ratio/mean"], abs=1e-6)


def test_beside_adapters_the_policy_is_told_and_its_reference_chooses_for_itself() -> None:
    groups = sampled_by(a_mixture(), routed(uneven_groups()))
    options: Any = {
        "algorithm": {"old_log_probs": "recompute", "kl": {"placement": "loss", "estimator": "k2"}},
        "model": {"lora": {"rank": 4, "targets": ["q_proj"]}},
    }

    replayed, _ = step("R3", groups, **options)
    own, _ = step(None, groups, **options)

    # Adapters begin with nothing: the reference is the policy, but for its experts.
    assert replayed.metrics["correction/probability_difference"] < 1e-5
    assert own.metrics["kl/mean"] == pytest.approx(0, abs=1e-9)
    assert replayed.metrics["kl/mean"] > 1e-3


def test_losses_of_routers_reach_routers_that_are_told() -> None:
    groups = routed(uneven_groups())
    balance: Any = {"optimisation": {"router": {"balance": 10.0}}}

    found, balanced = step("R3", groups, **balance)
    _, plain = step("R3", groups)

    assert found.metrics["router/balance"] > 0
    apart = [
        float((one - other).abs().max()) for one, other in zip(weights_of(balanced), weights_of(plain), strict=True)
    ]
    assert max(apart) > 1e-4


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "came without the experts"),
        (RoutedExperts.of(np.tile([0, 1], (6, 3, 1)), 4), "2 of 4 experts in 3 layers, and the model has 2 of 4"),
        (RoutedExperts.of(np.tile([0, 1], (6, 2, 1)), 8), "2 of 8 experts in 2 layers, and the model has 2 of 4"),
        (RoutedExperts(6, SIZES, RoutedExperts.of(np.tile([0, 9], (6, 2, 1)), 4).data), "name expert 9, there are 4"),
        (RoutedExperts(6, SIZES, b"hostile"), "cannot be uncompressed"),
        (RoutedExperts(6, SIZES, RoutedExperts.of(np.tile([0, 1], (5, 2, 1)), 4).data), "20 bytes, 6 tokens take 24"),
    ],
)
def test_a_group_whose_record_cannot_be_replayed_is_refused_with_the_reason(record: Any, why: str) -> None:
    group = a_group([0.0, 1.0])
    first = replace(group.trajectories[0], experts=RoutedExperts.of(np.tile([0, 1], (6, 2, 1)), 4))
    group = Group(group.task, (first, replace(group.trajectories[1], experts=record)))
    wanted = Requirements(VOCABULARY, 2, (), 0, routing=SIZES)

    found = find_problem(group, wanted)

    assert found is not None
    assert found[:2] == (Resolution.FAILED, "invalid_experts")
    assert why in found[2]
    assert find_problem(group, replace(wanted, routing=None)) is None
    with pytest.raises(DataError, match=why):
        experts_of(group.trajectories[1], SIZES)


@pytest.mark.parametrize("data", [b"hostile", RoutedExperts.of(np.tile([0, 1], (5, 2, 1)), 4).data])
def test_a_record_that_nobody_replays_stops_no_training(data: bytes) -> None:
    group = a_group([0.0, 1.0])
    turns = (Turn(0, 3, 4, FinishReason.STOP), Turn(4, 5, 7, FinishReason.STOP, is_fresh=True))
    cut = [replace(each, turns=turns) for each in group.trajectories]
    bad = [replace(each, experts=RoutedExperts(6, SIZES, data)) for each in cut]

    found = make_batch([replace(group, trajectories=tuple(bad))])

    assert found.experts is None
    expected = make_batch([replace(group, trajectories=tuple(cut))])
    assert [each.tolist() for each in found.token_ids] == [each.tolist() for each in expected.token_ids]
    assert len(found.token_ids) == 4


def test_a_record_of_more_than_the_model_has_is_refused_before_it_is_uncompressed() -> None:
    sizes = RoutingSizes(160, 1 << 15, 1 << 15)
    bomb = RoutedExperts(6, sizes, zlib.compress(bytes(6 * sizes.bytes_per_token)))
    group = a_group([0.0, 1.0])
    group = replace(group, trajectories=tuple(replace(each, experts=bomb) for each in group.trajectories))
    tracemalloc.start()
    try:
        found = find_problem(group, Requirements(VOCABULARY, 2, (), 0, routing=SIZES))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found is not None
    assert found[1] == "invalid_experts"
    assert most < bomb.raw_bytes / 20


def test_experts_follow_sequences_that_are_drawn_again() -> None:
    batch = make_batch(routed(uneven_groups()), replays_engine=True)

    taken, _ = batch.take(torch.tensor([3, 3, 0]))

    assert batch.experts is not None
    assert taken.experts is not None
    assert [each.tolist() for each in taken.experts] == [batch.experts[number].tolist() for number in (3, 3, 0)]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"algorithm": {"router_replay": "R2"}}, "old_log_probs rollout"),
        ({"algorithm": {"router_replay": "R3"}, "optimisation": {"compile_layers": True}}, "compile_layers"),
        (
            {
                "algorithm": {"router_replay": "R3"},
                "parallelism": {"ranks": 2, "sequence_parallel": 2},
            },
            "sequence_parallel 2",
        ),
        ({"algorithm": {"router_replay": "R3"}, "rollout": {"engine": {"kind": "vllm"}}}, "kind vllm"),
        (
            {"algorithm": {"router_replay": "R3"}, "rollout": {"engine": {"kind": "sglang", "device": "cpu"}}},
            "sglang on a CPU",
        ),
        ({"algorithm": {"router_replay": "R4"}}, "router_replay"),
    ],
)
def test_what_replay_does_not_go_with_is_refused_by_name(sections: Any, why: str) -> None:
    with pytest.raises(InvalidSpec, match=why):
        a_spec(**sections)
