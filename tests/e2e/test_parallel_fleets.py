"""Whole fleets: what is learned does not depend on how the trainer divides its work, for every architecture."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_kill import patiently, until_completed
from tests.fleet import make_experiment, running_fleet, tiny_model
from tests.integration.trainer.architectures import ARCHITECTURES

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

STEPS, FEW_STEPS = 20, 3
RATE = 1e-3
TOLERANCE = 1e-5
MARGIN = 0.05 * RATE
COMPARED = ("loss/total", "loss/policy", "grad_norm", "reward/mean", "advantage/mean_square", "entropy")
OF_CRITICS = ("loss/value", "value/mean")
SCORED = "correction/log_ppl_abs_diff"
"""How far the trainer's log-probs of an answer are from the engine's: nats per token, mean over answers."""

Sections = dict[str, dict[str, Any]]
Outcome = tuple[dict[tuple[int, str], float], Path]
"""Figures by step and name, and the folder of the last checkpoint's model."""

DENSE: dict[str, Sections] = {
    "two ranks": {"parallelism": {"ranks": 2}},
    "four ranks": {"parallelism": {"ranks": 4}},
    "copies of sharded weights": {"parallelism": {"ranks": 4, "replicas": 2}},
    "divided layers": {"parallelism": {"ranks": 2, "tensor_parallel": 2}},
    "divided sequences": {"parallelism": {"ranks": 2, "sequence_parallel": 2}, "optimisation": {"packing": "packed"}},
    "packed": {"optimisation": {"packing": "packed"}},
    "padded": {"optimisation": {"packing": "padded"}},
    "small micro-batches": {"optimisation": {"micro_batch_tokens": 96}},
    "large micro-batches": {"optimisation": {"micro_batch_tokens": 4096}},
}
EXPERTS: dict[str, Sections] = {
    "divided experts": {"parallelism": {"ranks": 2, "expert_parallel": 2}},
    "divided layers and experts": {"parallelism": {"ranks": 2, "tensor_parallel": 2, "expert_parallel": 2}},
}
WITH_CRITIC: Sections = {"algorithm": {"advantage": {"kind": "gae"}}}
CRITICS: dict[str, Sections] = {
    "divided layers of the critic": {"parallelism": {"ranks": 2, "critic": {"tensor_parallel": 2}}},
    "divided sequences of the critic": {
        "parallelism": {"ranks": 2, "critic": {"sequence_parallel": 2}},
        "optimisation": {"packing": "packed"},
    },
    "divided layers of the policy": {"parallelism": {"ranks": 2, "tensor_parallel": 2, "critic": {}}},
}


def with_model(directory: Path, make: Callable[..., Any]) -> Path:
    """Save a model of some architecture beside the tests' tokenizer."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model() / name).exists():
            shutil.copy(tiny_model() / name, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = make(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    return directory


def an_experiment(directory: Path, model: Path | None = None, sections: Sections | None = None) -> dict[str, Any]:
    """Make a spec that is on-policy: what a rollout samples depends on weights and seed alone.

    The tests' own model is computed alike in every batch; others are sampled one at a time.
    """
    alike = {"slots": 1} if model else {"slots": 16, "batch_invariant": True}
    spec = make_experiment(
        directory,
        rollout={"engine": {"context_tokens": 128, "threads": 1, **alike}},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain"},
        optimisation={
            "steps": STEPS,
            "learning_rate": RATE,
            "micro_batch_tokens": 512,
            # Gradients that are 0 but for rounding would make steps of full size.
            "epsilon": 1e-6,
        },
        checkpoint={"every_steps": STEPS},
    )
    for name, section in (sections or {}).items():
        spec[name] = {**spec.get(name, {}), **section}
    return spec | ({"model": {"path": str(model)}} if model else {})


async def trained(client: GatewayClient, spec: dict[str, Any]) -> Outcome:
    """Run an experiment to its end; it must be balanced."""
    view = await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60)
    path = f"/v1/experiments/{view['id']}"
    await client.call("POST", f"{path}/start", deadline_seconds=60)
    await until_completed(client, view["id"])
    ledger = (await patiently(client, f"{path}/ledger"))["train"]
    optimisation = spec["optimisation"]
    assert ledger["balanced"]
    assert ledger["trained"] == optimisation["steps"] * optimisation["groups_per_mini_batch"]
    names = ",".join((*COMPARED, *OF_CRITICS, SCORED))
    page = await client.call("GET", f"{path}/metrics", params={"names": names, "limit": 2000})
    figures = {(point["step"], point["name"]): point["value"] for point in page["items"]}
    checkpoints = (await patiently(client, f"{path}/checkpoints"))["items"]
    return figures, Path(checkpoints[-1]["path"]) / "model"


def furthest(one: Path, other: Path) -> float:
    """The largest difference of two checkpoints' parameters, whose names must be the same."""
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    return max(float((value - second[name]).abs().max()) for name, value in first.items())


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def names_in(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


def check_equal(found: Outcome, expected: Outcome, name: str) -> None:
    assert found[0].keys() == expected[0].keys()
    assert {step for step, _ in found[0]} == set(range(1, STEPS + 1))
    apart = {key: abs(found[0][key] - value) / max(1.0, abs(value)) for key, value in expected[0].items()}
    key = max(apart, key=apart.__getitem__)
    parameters = furthest(found[1], expected[1])
    print(f"{name}: {key[1]} of step {key[0]} {apart[key]:.1e} apart, parameters {parameters / RATE:.2%} of the rate")
    assert apart[key] <= TOLERANCE, (name, key)
    assert parameters <= MARGIN, name


async def test_a_fleet_learns_the_same_however_its_trainer_divides_the_work(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            expected = await trained(client, an_experiment(tmp_path))
            for name, sections in DENSE.items():
                check_equal(await trained(client, an_experiment(tmp_path, None, sections)), expected, name)


async def test_a_fleet_learns_the_same_however_its_trainer_divides_the_critic(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            expected = await trained(client, an_experiment(tmp_path, None, WITH_CRITIC))
            assert {name for _, name in expected[0]} >= set(OF_CRITICS)
            for name, sections in CRITICS.items():
                check_equal(
                    await trained(client, an_experiment(tmp_path, None, WITH_CRITIC | sections)), expected, name
                )


async def test_a_fleet_learns_the_same_however_its_trainer_divides_experts(tmp_path: Path) -> None:
    model = with_model(tmp_path / "experts", ARCHITECTURES["Qwen3-MoE"])
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            expected = await trained(client, an_experiment(tmp_path, model))
            for name, sections in EXPERTS.items():
                check_equal(await trained(client, an_experiment(tmp_path, model, sections)), expected, name)


async def test_every_architecture_is_trained_by_a_fleet_and_scored_as_it_sampled(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            for name, make in ARCHITECTURES.items():
                model = with_model(tmp_path / name.replace(" ", "-"), make)
                recomputed = {"algorithm": {"old_log_probs": "recompute"}}
                spec = an_experiment(tmp_path, model, recomputed)
                spec["optimisation"]["steps"] = spec["checkpoint"]["every_steps"] = FEW_STEPS
                figures, checkpoint = await trained(client, spec)
                apart = [value for (_, figure), value in figures.items() if figure == SCORED]
                print(f"{name}: {max(apart):.1e} nats apart")
                assert len(apart) == FEW_STEPS
                assert max(apart) <= TOLERANCE, name
                assert names_in(checkpoint) == names_in(model), name
                assert furthest(checkpoint, model) > 0
