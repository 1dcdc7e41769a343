"""What is learned does not depend on the number of ranks, nor does what they publish."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from flotilla.services.trainer.checkpoint.files import paths_in, reserve, shared_files, write_shared
from flotilla.services.trainer.data import packing
from flotilla.services.trainer.learning.learner import Learner
from flotilla.services.trainer.learning.opening import make_learner
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.parallel.ranks import ONE_RANK, MeshShape, Ranks
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.weights.parts import index_of, write_parts
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.shared.checkpoints.folders import CRITIC, MODEL, OPTIMIZER
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.integration.trainer.ranks import TWO_RANKS, in_parts, run_ranks, stored
from tests.unit.trainer.builders import VOCABULARY, a_model, a_spec, uneven_groups
from tests.unit.trainer.test_finished import ROWS, a_classifier, pairs, spec_of

pytestmark = [pytest.mark.timeout(900)]

STEPS = 5
EQUAL_STEPS = 3
RATE = 1e-2
MARGIN = 0.05 * RATE
RESHARDED: dict[str, Any] = {"advantage": {"kind": "gae"}}
SENSITIVE = {"correction/chi2_seq", "correction/chi2_token", "norm"}
"""Exponentials of log-ratios, which are in the thousands here, and the gradient's norm: steps of this size move them by
more than a loss. The parameters are compared instead."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "token mean": {},
    "recomputed, kl in the loss, entropy": {
        "old_log_probs": "recompute",
        "kl": {"placement": "loss"},
        "entropy_coefficient": 0.01,
    },
    "clip_cov": {"policy_loss": {"kind": "clip_cov"}},
    "versions": {"old_log_probs": "recompute_at_version"},
    "critic": {"advantage": {"kind": "gae"}},
    "a teacher": {"distillation": {"path": "/teacher", "coefficient": 0.1}},
}


FINISHED: dict[str, dict[str, Any]] = {
    "sft": {"response_column": "answer"},
    "preference": {"loss": {"kind": "dpo"}, "supervised_coefficient": 0.5},
    "kto": {"beta": 0.5, "undesirable_weight": 2.0},
    "taught": {"kind": "sft", "response_column": "answer", "distillation": {"path": "teacher", "coefficient": 0.4}},
    "reward_model": {},
}


def equality(
    ranks: Ranks, algorithms: dict[str, dict[str, Any]], *, critic: dict[str, int] | None = None
) -> dict[str, Any]:
    """Train each algorithm on this job and, in the first rank, alone; returns how far apart they end."""
    found = {}
    for name, algorithm in algorithms.items():
        several, measured = _trained(algorithm, ranks, critic=critic)
        one, expected = _trained(algorithm, None) if ranks.is_leader else (None, measured)
        apart = {
            f"{key} of step {step + 1}": abs(value - measured[step][key]) / max(1.0, abs(value))
            for step in range(EQUAL_STEPS)
            for key, value in expected[step].items()
            if key not in SENSITIVE
        }
        found[name] = {
            "measured": measured,
            "metrics": max(apart.items(), key=lambda pair: pair[1]),
            "parameters": max(_furthest(one, several), _furthest_critic(one, several)),
            "is_image_exact": _is_image_exact(several.loaded.model, ranks, a_model()),
        }
    return found


def critics(ranks: Ranks, sections: list[dict[str, int]]) -> dict[str, Any]:
    """Train with critics that are divided otherwise than the policy, as ``equality`` does."""
    found = {str(section): equality(ranks, {"critic": RESHARDED}, critic=section)["critic"] for section in sections}
    assert all({"value/mean", "loss/value"} <= figures["measured"][0].keys() for figures in found.values())
    return found


def architectures(ranks: Ranks, names: list[str]) -> dict[str, Any]:
    """Train each architecture for some steps as ``equality`` does."""
    found = {}
    for name in names:
        make = ARCHITECTURES[name]
        one, several = (_trained({}, each, make=make, steps=3) for each in (None, ranks))
        losses = [(a["loss/total"], b["loss/total"]) for a, b in zip(one[1], several[1], strict=True)]
        found[name] = {
            "loss": max(abs(first - second) for first, second in losses),
            "parameters": _furthest(one[0], several[0]),
            "is_image_exact": _is_image_exact(several[0].loaded.model, ranks, make()),
        }
    return found


def finished(ranks: Ranks, kinds: list[str]) -> dict[str, tuple[float, float]]:
    """Train on finished answers on this job and alone; how far apart losses and norms, and parameters, end."""
    found = {}
    for kind in kinds:
        job = {"kind": kind} | FINISHED[kind]
        one, several = (_taught(job, each) for each in (ONE_RANK, ranks))
        figures = [abs(first - second) for first, second in zip(one[1], several[1], strict=True)]
        found[kind] = (max(figures), _furthest(one[0], several[0]))
    return found


def _taught(job: dict[str, Any], ranks: Ranks) -> tuple[Learner, list[float]]:
    make = a_classifier if job["kind"] == "reward_model" else a_model
    spec = spec_of(job, packing="packed", micro_batch_tokens=64)
    second = make() if spec.needs_reference else None
    made: Callable[..., Learner] = partial(make_learner, spec)
    if "distillation" in job:
        second = a_model(num_hidden_layers=1, vocab_size=VOCABULARY + 8)

        def made(loaded: LoadedModel, teacher: LoadedModel, ranks: Ranks = ONE_RANK) -> Learner:
            return make_learner(spec, loaded, teachers=[teacher], ranks=ranks)

    learner = _made(made, [make(), second], ranks, scores=job["kind"] == "reward_model")
    figures = []
    for step in (1, 2):
        result = learner.train(ROWS.get(job["kind"], pairs)(), step)
        figures += [result.metrics["loss/total"], result.updates[-1].grad_norm]
    return learner, figures


def layers(ranks: Ranks, algorithms: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare what layers that ranks share learn with one rank, from samples and from finished answers."""
    return equality(ranks, algorithms), finished(ranks, list(FINISHED))


def sequences(ranks: Ranks, algorithms: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare what ranks that share sequences learn with one rank."""
    return equality(ranks, algorithms), finished(ranks, ["sft", "kto", "taught"])


def written(ranks: Ranks, argument: tuple[str, dict[str, int] | None]) -> list[float]:
    """Train on this job, write a checkpoint into a directory, train on; returns the losses afterwards."""
    directory, critic = argument
    learner, _ = _trained(RESHARDED, ranks, steps=2, critic=critic)
    files = shared_files(learner)
    if ranks.is_leader:
        reserve(Path(directory), files, Path(directory).parent, learner)
    ranks.gather(b"")
    write_shared(paths_in(Path(directory), files), files)
    ranks.gather(b"")
    return _continued(learner)


def read(ranks: Ranks, argument: tuple[str, dict[str, int] | None]) -> list[float]:
    """Go on from that checkpoint on this job; returns the losses."""
    directory, critic = argument
    path = Path(directory) / MODEL
    if ranks.is_several:
        loaded = in_parts(path)
    else:
        loaded = LoadedModel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), path)
    learner = Learner(_spec(RESHARDED, ranks, critic), loaded, ranks=ranks)
    learner.optimizer.load(load_file(Path(directory) / OPTIMIZER), updates=4)
    assert learner.critic is not None
    learner.critic.load(load_file(Path(directory) / CRITIC), updates=4)
    return _continued(learner)


def _continued(learner: Learner) -> list[float]:
    results = [learner.train(uneven_groups(seed=step), step) for step in (3, 4)]
    return [result.metrics["loss/total"] for result in results] + [results[-1].updates[-1].grad_norm]


def _spec(algorithm: dict[str, Any], ranks: Ranks = ONE_RANK, critic: dict[str, int] | None = None) -> ExperimentSpec:
    return a_spec(
        algorithm=algorithm,
        parallelism={} if critic is None else {"ranks": ranks.size, "critic": critic},
        optimisation={
            "steps": STEPS,
            "groups_per_mini_batch": 2,
            "learning_rate": RATE,
            "micro_batch_tokens": 96,
            # Gradients that are 0 but for rounding, such as that of GPT-2's key bias, would make steps of full size.
            "epsilon": 1e-6,
        },
        asynchrony={"require_batches": 2},
        samples={},
    )


def _trained(
    algorithm: dict[str, Any],
    ranks: Ranks | None,
    *,
    make: Callable[[], nn.Module] = a_model,
    steps: int = EQUAL_STEPS,
    critic: dict[str, int] | None = None,
) -> tuple[Learner, list[dict[str, float]]]:
    reference = make() if algorithm.get("kl") else None
    teacher = a_model(hidden_size=48) if algorithm.get("distillation") else None
    spec = _spec(algorithm, ranks or ONE_RANK, critic)

    def made(policy: LoadedModel, other: LoadedModel | None, taught_by: LoadedModel | None, **options: Any) -> Learner:
        return Learner(spec, policy, other, () if taught_by is None else (taught_by,), **options)

    learner = _made(made, [make(), reference, teacher], ranks or ONE_RANK)
    figures = []
    for step in range(1, steps + 1):
        result = learner.train(uneven_groups(seed=step), step)
        assert result.traced is not None
        figures.append(
            dict(result.metrics)
            | {"norm": result.updates[-1].grad_norm}
            | {"traced": float(torch.tensor(result.traced.log_probs).nansum())}
        )
    return learner, figures


def _made(
    make: Callable[..., Learner], models: list[nn.Module | None], ranks: Ranks, *, scores: bool = False
) -> Learner:
    """Make a learner of models: one rank has them whole, several read their parts from files."""
    if not ranks.is_several:
        return make(*(None if each is None else LoadedModel(each, Path()) for each in models))
    with ExitStack() as files:
        return make(*(files.enter_context(stored(each, ranks, scores=scores)) for each in models), ranks=ranks)


def _furthest(one: Learner | None, several: Learner) -> float:
    whole = [_whole(parameter) for parameter in several.loaded.model.parameters()]
    if one is None:
        return 0.0
    pairs = zip(one.loaded.model.parameters(), whole, strict=True)
    return max(float((first - second).abs().max().detach()) for first, second in pairs)


def _furthest_critic(one: Learner | None, several: Learner) -> float:
    if several.critic is None:
        return 0.0
    whole = {name: _whole(value) for name, value in several.critic.state().items() if name.startswith("weight/")}
    if one is None:
        return 0.0
    assert one.critic is not None
    alone = one.critic.state()
    return max(float((alone[name] - value).abs().max()) for name, value in whole.items())


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Put the ranks' parts together; every rank does it. Fused experts are divided as torch 2.11 joins no tensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    whole, count = torch.zeros(2, *parameter.shape)
    whole[index_of(parameter)], count[index_of(parameter)] = parameter.detach().to_local(), 1.0
    for each in (whole, count):
        dist.all_reduce(each)
    return whole / count


def _is_image_exact(sharded: nn.Module, ranks: Ranks, whole: nn.Module) -> bool:
    """Compare what the ranks write together with what one rank writes of the same weights; ``whole`` is overwritten."""
    with torch.no_grad():
        for plain, parameter in zip(whole.parameters(), sharded.parameters(), strict=True):
            plain.copy_(_whole(parameter))
    flat, weights = FlatParameters(whole), ShardedParameters(sharded, is_leader=ranks.is_leader)
    with WeightImage.create(flat.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        flat.snapshot_into(image)
        expected = bytes(image.view)
    with WeightImage.create(weights.layout.image_bytes, directory=Path(tempfile.gettempdir())) as image:
        image.view[: len(weights.layout.header)] = weights.layout.header
        write_parts(image.mapped, weights.layout, weights.image_parts())
        written = np.stack([np.frombuffer(each, np.uint8) for each in ranks.gather(bytes(image.view))])
    # What a rank does not write stays 0.
    return written.max(0).tobytes() == expected


def by_sequence(ranks: Ranks, section: dict[str, int]) -> tuple[float, float, list[bool]]:
    """Train packed groups with shared prompts on this job, without any mask, and alone."""
    spec = a_spec(
        algorithm=RESHARDED | {"kl": {"placement": "loss"}},
        parallelism={"ranks": ranks.size, "critic": section} if ranks.is_several else {},
        optimisation={
            "steps": STEPS,
            "groups_per_mini_batch": 2,
            "learning_rate": RATE,
            "micro_batch_tokens": 256,
            "packing": "packed",
            "epsilon": 1e-6,
        },
        asynchrony={"require_batches": 2},
    )
    trained = []
    for each in (ONE_RANK, ranks):
        learner = _made(partial(Learner, spec), [a_model(), a_model()], each)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(packing, "_block_causal", _refuse_mask)
            results = [learner.train(uneven_groups(seed=step, prompt=9), step).metrics for step in (1, 2)]
        trained.append((learner, [found["loss/total"] + found["loss/value"] for found in results]))
    (one, expected), (several, found) = trained
    computing = [several.policy, several.reference, several.critic]
    return (
        max(abs(a - b) for a, b in zip(found, expected, strict=True)),
        max(_furthest(one, several), _furthest_critic(one, several)),
        [each is not None and each.attends_apart for each in computing],
    )


def _refuse_mask(*_: object) -> torch.Tensor:
    raise AssertionError("a dense mask is made")


def _check_equality(all_found: list[dict[str, Any]]) -> None:
    for found in all_found:
        assert {name: figures["measured"] for name, figures in found.items()} == {
            name: figures["measured"] for name, figures in all_found[0].items()
        }
    for name, figures in all_found[0].items():
        assert figures["metrics"][1] < 1e-5, (name, figures)
        assert figures["parameters"] < MARGIN, (name, figures)
        assert figures["is_image_exact"], (name, figures)


def _check_finished(found: dict[str, tuple[float, float]]) -> None:
    for kind, (figures, parameters) in found.items():
        assert figures < 1e-5, (kind, found)
        assert parameters < MARGIN, (kind, found)


def _check_architectures(all_found: dict[str, Any]) -> None:
    for name, found in all_found.items():
        assert found["loss"] < 1e-5, (name, found)
        assert found["parameters"] < MARGIN, (name, found)
        assert found["is_image_exact"], (name, found)


def test_two_ranks_learn_what_one_learns() -> None:
    found = run_ranks(equality, ALGORITHMS)

    _check_equality(found)


def test_two_ranks_learn_from_labels_and_from_a_teacher_what_one_learns() -> None:
    found = run_ranks(finished, ["kto", "taught"])

    _check_finished(found[0])


def test_ranks_that_share_sequences_learn_what_one_rank_learns() -> None:
    packed = {name: ALGORITHMS[name] for name in ("recomputed, kl in the loss, entropy", "critic")}

    found = run_ranks(sequences, packed, MeshShape(2, sequence=2))

    _check_equality([equal for equal, _ in found])
    _check_finished(found[0][1])


def test_ranks_that_share_layers_learn_what_one_rank_learns() -> None:
    chosen = {name: ALGORITHMS[name] for name in ("recomputed, kl in the loss, entropy", "critic")}

    found = run_ranks(layers, chosen, MeshShape(1, tensor=2))

    _check_equality([equal for equal, _ in found])
    _check_finished(found[0][1])


def test_a_critic_that_is_divided_otherwise_learns_what_it_learns_alone() -> None:
    found = run_ranks(critics, [{"tensor_parallel": 2}])

    _check_equality(found)


@pytest.mark.parametrize(
    ("policy", "critic"),
    [
        (TWO_RANKS, {"sequence_parallel": 2}),
        pytest.param(MeshShape(2, sequence=2), {"tensor_parallel": 2}, marks=pytest.mark.long),
        pytest.param(MeshShape(1, tensor=2), {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_packed_rows_need_no_mask_however_ranks_are_divided(policy: MeshShape, critic: dict[str, int]) -> None:
    for losses, parameters, attends_apart in run_ranks(by_sequence, critic, policy):
        assert attends_apart == [True] * 3
        assert losses < 1e-5
        assert parameters < MARGIN


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "sections"),
    [
        (TWO_RANKS, [{"sequence_parallel": 2}]),
        (MeshShape(1, tensor=2), [{}, {"sequence_parallel": 2}]),
        (MeshShape(2, sequence=2), [{}, {"tensor_parallel": 2}]),
        (MeshShape(2, tensor=2), [{}, {"replicas": 2}, {"sequence_parallel": 2}, {"tensor_parallel": 2}]),
        (MeshShape(4), [{"tensor_parallel": 2}, {"replicas": 2}]),
        (MeshShape(2, replicate=2), [{}, {"sequence_parallel": 2}]),
    ],
    ids=str,
)
def test_policy_and_critic_may_each_be_divided_as_they_like(policy: MeshShape, sections: list[dict[str, int]]) -> None:
    found = run_ranks(critics, sections, policy)

    _check_equality(found)


@pytest.mark.long
def test_a_critic_that_cannot_be_divided_so_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"parallelism\.critic: parallelism.sequence_parallel 4 does not divide"):
        run_ranks(critics, [{"sequence_parallel": 4}], MeshShape(4))


@pytest.mark.long
def test_divided_layers_that_are_sharded_learn_what_one_rank_learns() -> None:
    found = run_ranks(layers, ALGORITHMS, MeshShape(2, tensor=2))

    _check_equality([equal for equal, _ in found])
    _check_finished(found[0][1])


def test_ranks_that_divide_experts_learn_what_one_rank_learns() -> None:
    first, _ = run_ranks(architectures, ["Qwen3-MoE"], MeshShape(2, expert=2))

    _check_architectures(first)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(4, expert=2),
        MeshShape(2, replicate=2, expert=2),
        MeshShape(1, tensor=2),
        MeshShape(1, tensor=2, expert=2),
        MeshShape(2, tensor=2, expert=4),
    ],
    ids=str,
)
def test_experts_and_layers_may_be_divided_together(shape: MeshShape) -> None:
    first, *_ = run_ranks(architectures, ["Qwen3-MoE", "Mixtral"], shape)

    _check_architectures(first)


@pytest.mark.long
def test_shares_of_two_ranks_learn_what_one_rank_learns() -> None:
    found = run_ranks(equality, ALGORITHMS, MeshShape(4, sequence=2))

    _check_equality(found)


@pytest.mark.long
def test_copies_of_sharded_weights_learn_what_one_rank_learns() -> None:
    found = run_ranks(equality, ALGORITHMS, MeshShape(2, replicate=2))

    _check_equality(found)


@pytest.mark.long
def test_every_architecture_has_the_names_and_values_of_one_rank() -> None:
    first, _ = run_ranks(architectures, list(ARCHITECTURES))

    _check_architectures(first)


@pytest.mark.long
def test_every_architecture_with_a_plan_can_be_divided() -> None:
    first, _ = run_ranks(architectures, [name for name in ARCHITECTURES if name != "GPT-2"], MeshShape(1, tensor=2))

    _check_architectures(first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("GPT-2", MeshShape(1, tensor=2), "tensor_parallel does not work with GPT2LMHeadModel"),
        ("Llama", MeshShape(2, expert=2), "expert_parallel does not work with LlamaForCausalLM"),
        ("Llama", MeshShape(1, tensor=4), "tensor_parallel 4 does not divide the model's 2 heads"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(name: str, shape: MeshShape, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(architectures, [name], shape)


ONE, TWO, FOUR = MeshShape(1), MeshShape(2), MeshShape(4)
DIVIDED = MeshShape(1, tensor=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DIVIDED, ONE),
        pytest.param(TWO, ONE, marks=pytest.mark.long),
        pytest.param(TWO, FOUR, marks=pytest.mark.long),
        pytest.param(DIVIDED, TWO, marks=pytest.mark.long),
        pytest.param(TWO, MeshShape(2, tensor=2), marks=pytest.mark.long),
        pytest.param(MeshShape(2, tensor=2), DIVIDED, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_under_ranks_of_another_shape(tmp_path: Path, before: MeshShape, after: MeshShape) -> None:
    expected, *_ = run_ranks(written, (str(tmp_path), None), before)

    found = _read_under(after, (str(tmp_path), None))

    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "critic_before", "after", "critic_after"),
    [
        (TWO, {"tensor_parallel": 2}, ONE, None),
        (DIVIDED, {}, TWO, None),
        (TWO, None, MeshShape(2, tensor=2), {"sequence_parallel": 2}),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_with_its_critic_divided_otherwise(
    tmp_path: Path,
    before: MeshShape,
    critic_before: dict[str, int] | None,
    after: MeshShape,
    critic_after: dict[str, int] | None,
) -> None:
    expected, *_ = run_ranks(written, (str(tmp_path), critic_before), before)

    found = _read_under(after, (str(tmp_path), critic_after))

    assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)


def _read_under(after: MeshShape, argument: tuple[str, dict[str, int] | None]) -> list[float]:
    return read(ONE_RANK, argument) if after == ONE else list(run_ranks(read, argument, after)[0])
