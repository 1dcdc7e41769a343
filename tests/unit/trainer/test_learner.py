"""Invariant 9: what is learned does not depend on micro-batching and packing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.services.trainer.data.batch import make_batch
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.shared.schemas.trajectory import Group
from tests.unit.trainer.builders import a_group, a_model, a_spec, uneven_groups

LAYOUTS: list[dict[str, Any]] = [
    {"packing": "padded", "micro_batch_tokens": 100_000},
    {"packing": "padded", "micro_batch_tokens": 64},
    {"packing": "packed", "micro_batch_tokens": 100_000},
    {"packing": "packed", "micro_batch_tokens": 96},
    {"packing": "auto", "micro_batch_tokens": 1},
]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token mean": {},
    "sequence mean, k3": {
        "aggregation": {"mode": "seq-mean-token-mean"},
        "kl": {"placement": "loss"},
        "entropy_coefficient": 0.01,
    },
    "recomputed, corrected": {"old_log_probs": "recompute"},
    "gspo": {"policy_loss": {"kind": "gspo"}, "aggregation": {"mode": "seq-mean-token-mean"}},
    "drawn again, with loss weights": {
        "resampling": {"kind": "pow"},
        "kl": {"placement": "loss"},
        "sequence_weights": {"length": True},
    },
    "critic": {"advantage": {"kind": "gae"}},
    "kl in the reward": {"kl": {"placement": "reward"}, "old_log_probs": "recompute"},
}


def trained(
    groups: list[Group], algorithm: dict[str, Any], *, seed: int = 0, **optimisation: Any
) -> tuple[Learner, dict[str, float]]:
    """Train one step on a fresh model, with large steps and no division by small gradients."""
    settings = {"steps": 5, "groups_per_mini_batch": 2, "learning_rate": 1e-2, "epsilon": 1.0}
    spec = a_spec(
        algorithm=algorithm, optimisation=settings | optimisation, asynchrony={"require_batches": len(groups) // 2}
    ).model_copy(update={"seed": seed})
    reference = LoadedModel(a_model(), Path()) if algorithm.get("kl") else None
    learner = Learner(spec, LoadedModel(a_model(), Path()), reference)
    return learner, dict(learner.train(groups, 1).metrics)


@pytest.mark.parametrize("prompt", [0, 9], ids=["prompts apart", "prompts shared"])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_a_step_does_not_depend_on_how_it_is_cut(algorithm: dict[str, Any], prompt: int) -> None:
    groups = uneven_groups(prompt=prompt)
    expected, losses = trained(groups, algorithm, **LAYOUTS[0])

    for layout in LAYOUTS[1:]:
        found, metrics = trained(groups, algorithm, **layout)

        for name, value in losses.items():
            assert metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (layout, name)
        for (name, parameter), (_, reference) in zip(
            found.loaded.model.named_parameters(), expected.loaded.model.named_parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, reference, atol=1e-5, rtol=0, msg=f"{layout} {name}")


def test_the_prompt_of_a_group_is_computed_once() -> None:
    groups = uneven_groups(prompt=60)
    learner, _ = trained(groups, {}, packing="auto", micro_batch_tokens=100_000)
    batch = make_batch(groups)

    [micro] = learner._cut_of(batch, range(batch.num_sequences))(100_000)

    assert set(micro.layout.shared.values()) == {60}
    assert micro.layout.positions < 0.6 * sum(map(len, batch.token_ids))


def test_only_the_largest_and_smallest_rewards_are_trained_where_these_are_drawn() -> None:
    algorithm = {"advantage": {"kind": "reinforce"}, "resampling": {"kind": "max_min"}}
    rewards = [0.5, 2.0, -1.0, 0.3]
    one, other = [a_group(rewards, number) for number in (0, 1)], [a_group(rewards, number) for number in (0, 1)]
    for group in other:
        for middle in (0, 3):
            group.trajectories[middle].token_ids[-2:] = 7

    first, losses = trained(one, algorithm)
    second, _ = trained(other, algorithm)
    seeded, _ = trained(one, algorithm, seed=1)
    whole, _ = trained(one, {"advantage": {"kind": "reinforce"}})
    whole_other, _ = trained(other, {"advantage": {"kind": "reinforce"}})

    def weights(learner: Learner) -> torch.Tensor:
        return learner.weights.copies(as_published=False)["float32"]

    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(seeded)), "another seed draws others"
    assert not torch.equal(weights(whole), weights(whole_other)), "without it every sequence counts"
    assert losses["loss/policy"] != 0


def test_a_shuffled_pass_trains_the_same_samples_in_other_mini_batches() -> None:
    groups = uneven_groups()
    frozen: dict[str, Any] = {"learning_rate": 1e-30}

    _, losses = trained(groups, {}, **frozen)
    _, mixed = trained(groups, {}, shuffle=True, **frozen)
    learner, _ = trained(groups, {}, shuffle=True, epochs_per_step=2)
    again, _ = trained(groups, {}, shuffle=True, epochs_per_step=2)
    ordered, _ = trained(groups, {}, epochs_per_step=2)

    assert torch.equal(
        learner.weights.copies(as_published=False)["float32"], again.weights.copies(as_published=False)["float32"]
    )
    assert not torch.equal(
        learner.weights.copies(as_published=False)["float32"], ordered.weights.copies(as_published=False)["float32"]
    )
    assert mixed["loss/policy"] != losses["loss/policy"], "means over other mini-batches"
    assert mixed["ratio/approx_kl"] == pytest.approx(losses["ratio/approx_kl"], rel=1e-4), "of the same tokens"


def test_every_mini_batch_makes_an_update_in_every_epoch() -> None:
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 2, "epochs_per_step": 3}, asynchrony={"require_batches": 2}
    )
    learner = Learner(spec, LoadedModel(a_model(), Path()))

    result = learner.train(uneven_groups(4), 1)

    assert len(result.updates) == 6
    assert learner.optimizer.updates == 6


def test_groups_without_a_difference_leave_only_momentum() -> None:
    spec = a_spec(optimisation={"steps": 5, "groups_per_mini_batch": 1, "learning_rate": 1e-2})
    learner = Learner(spec, LoadedModel(a_model(), Path()))
    flat = a_group([1.0, 1.0, 1.0, 1.0])

    before = learner.weights.copies(as_published=False)["float32"].clone()
    learner.train([flat], 1)
    unmoved = learner.weights.copies(as_published=False)["float32"].clone()
    learner.train([a_group([0.0, 1.0, 1.0, 0.0], 1)], 2)
    moved = learner.weights.copies(as_published=False)["float32"].clone()
    result = learner.train([flat], 3)

    assert torch.equal(before, unmoved)
    assert not torch.equal(moved, learner.weights.copies(as_published=False)["float32"]), (
        "as a loop that computes its zeros would do"
    )
    assert result.updates[0].grad_norm == 0


def test_a_step_without_an_advantage_has_a_loss_of_zero() -> None:
    flat = [a_group([1.0, 1.0], n) for n in range(2)]

    _, metrics = trained(flat, {})

    assert (metrics["loss/total"], metrics["loss/policy"]) == (0.0, 0.0)


def test_recompute_at_version_uses_the_weights_that_sampled() -> None:
    spec = a_spec(
        algorithm={"old_log_probs": "recompute_at_version"},
        optimisation={"steps": 5, "groups_per_mini_batch": 1, "learning_rate": 1e-2},
        asynchrony={"staleness_threshold": 1.0},
    )
    learner = Learner(spec, LoadedModel(a_model(), Path()))
    recomputed = Learner(
        a_spec(algorithm={"old_log_probs": "recompute"}, optimisation={"steps": 5, "groups_per_mini_batch": 1}),
        LoadedModel(a_model(), Path()),
    )
    old = a_group([0.0, 1.0, 1.0, 0.0], 1)
    for each in (learner, recomputed):
        each.train([a_group([0.0, 1.0, 0.5, 0.0])], 1)
    learner.keep_version(1, 0)
    weights = learner.weights.copies(as_published=False)["float32"].clone()

    under_version_0 = learner.train([old], 2).metrics
    fresh = recomputed.train([old], 2).metrics

    assert not torch.equal(weights, learner.weights.copies(as_published=False)["float32"])
    assert fresh["ratio/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(under_version_0["ratio/approx_kl"]) > 1e-4
    assert learner.versions is not None
    assert learner.versions.versions == (0, 1)


def test_bfloat16_weights_follow_float32_masters() -> None:
    spec = a_spec(
        model={"path": "/nowhere", "dtype": "bfloat16"},
        optimisation={"steps": 50, "groups_per_mini_batch": 4, "learning_rate": 1e-5},
    )
    learner = Learner(spec, LoadedModel(a_model().bfloat16(), Path()))
    name = "model.layers.0.self_attn.q_proj.weight"

    before = learner.optimizer.state()[f"master/{name}"].clone()
    for step in range(1, 4):
        learner.train(uneven_groups(), step)
    state = learner.optimizer.state()
    weight = dict(learner.loaded.model.named_parameters())[name]

    change = (state[f"master/{name}"] - before).abs().max()
    assert 1e-5 < change < 1e-4, "smaller than bfloat16 resolves, and not lost"
    assert torch.equal(weight, state[f"master/{name}"].bfloat16())


def test_a_learner_that_follows_another_spec_trains_the_next_step_as_one_that_was_made_with_it() -> None:
    groups = uneven_groups()
    settings = {"steps": 5, "groups_per_mini_batch": 2, "epsilon": 1.0}

    def a_learner(rate: float, **algorithm: Any) -> Learner:
        section = {"kl": {"placement": "loss", "coefficient": 0.1}} | algorithm
        spec = a_spec(
            algorithm=section,
            optimisation=settings | {"learning_rate": rate},
            asynchrony={"require_batches": len(groups) // 2},
        )
        return Learner(spec, LoadedModel(a_model(), Path()), LoadedModel(a_model(), Path()))

    other = {"entropy_coefficient": 0.3, "kl": {"placement": "loss", "coefficient": 0.5}}
    expected, found = a_learner(3e-2, **other), a_learner(1e-2)
    before = a_learner(1e-2).train(groups, 1).metrics

    found.follow(expected.spec)

    losses = [dict(each.train(groups, 1).metrics) for each in (found, expected)]
    assert losses[0] == losses[1] != before
    assert (found.spec, found.kl_coefficient) == (expected.spec, 0.5)
    for mine, theirs in zip(found.loaded.model.parameters(), expected.loaded.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_coefficient_that_a_controller_moved_stays_until_another_one_is_configured() -> None:
    groups = uneven_groups()
    learner, _ = trained(groups, {"kl": {"placement": "loss", "coefficient": 0.1}})
    learner.kl_coefficient = 0.17

    learner.follow(learner.spec.model_copy(update={"seed": 8}))
    assert learner.kl_coefficient == 0.17

    algorithm = learner.spec.algorithm
    assert algorithm.kl is not None
    kl = algorithm.kl.model_copy(update={"coefficient": 0.2})
    learner.follow(learner.spec.model_copy(update={"algorithm": algorithm.model_copy(update={"kl": kl})}))
    assert learner.kl_coefficient == 0.2


@pytest.mark.parametrize(("own", "expected"), [(None, 0.5), (0.125, 0.125)])
def test_a_critic_follows_the_learning_rate_unless_it_has_its_own(own: float | None, expected: float) -> None:
    value_loss = {} if own is None else {"value_loss": {"learning_rate": own}}
    spec = a_spec(algorithm={"advantage": {"kind": "gae"}} | value_loss)
    learner = Learner(spec, LoadedModel(a_model(), Path()))
    assert learner.critic is not None

    changed = spec.optimisation.model_copy(update={"learning_rate": 0.5, "max_grad_norm": 0.25})
    learner.follow(spec.model_copy(update={"optimisation": changed}))

    config = learner.critic.optimizer._config
    assert (config.learning_rate, config.max_grad_norm) == (expected, 0.25)
