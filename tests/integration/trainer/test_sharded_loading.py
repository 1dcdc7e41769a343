"""Ranks read the parts of a model that they keep, and never have more of it."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.parallel.fsdp import shard
from flotilla.services.trainer.parallel.ranks import MeshShape, Ranks
from tests.integration.trainer.architectures import ARCHITECTURES
from tests.integration.trainer.ranks import in_parts, run_ranks

pytestmark = [pytest.mark.timeout(300)]

EXPERTS = ["Qwen3-MoE", "Mixtral"]


def differing(ranks: Ranks, work: tuple[str, list[str]]) -> list[str]:
    """Read models on this job; which parameters and buffers are not what transformers loads?"""
    directory, names = work
    found = []
    for name in names:
        path = Path(directory) / name
        policy = Policy.of(in_parts(path), 1.0, ranks)
        policy.shard(ranks)
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        expected = Policy(whole, temperature=1.0).traits
        for each in ("has_plain_head", "can_pack", "can_share_prompts"):
            if getattr(policy, each) != getattr(expected, each):
                found.append(f"{name}: {each}")
        mine = dict(policy.model.named_parameters()) | dict(policy.model.named_buffers())
        theirs = dict(whole.named_parameters()) | dict(whole.named_buffers())
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            own = mine[key].full_tensor() if isinstance(mine[key], DTensor) else mine[key]
            if not torch.equal(own, value):
                found.append(f"{name}: {key}")
    return found


def saved(directory: Path, names: list[str]) -> tuple[str, list[str]]:
    for name in names:
        ARCHITECTURES[name]().save_pretrained(directory / name)  # type: ignore[operator]
    return str(directory), names


def test_every_architecture_is_read_in_parts_to_the_bit(tmp_path: Path) -> None:
    found = run_ranks(differing, saved(tmp_path, list(ARCHITECTURES)))

    assert found == [[], []]


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (MeshShape(3), list(ARCHITECTURES)),
        (MeshShape(2, replicate=2), list(ARCHITECTURES)),
        (MeshShape(1, tensor=2), [name for name in ARCHITECTURES if name != "GPT-2"]),
        (MeshShape(2, tensor=2), [name for name in ARCHITECTURES if name != "GPT-2"]),
        (MeshShape(2, expert=2), EXPERTS),
        (MeshShape(2, tensor=2, expert=4), EXPERTS),
    ],
    ids=str,
)
def test_divided_models_are_read_in_parts_to_the_bit(tmp_path: Path, shape: MeshShape, names: list[str]) -> None:
    found = run_ranks(differing, saved(tmp_path, names), shape)

    assert found == [[]] * shape.size


HIDDEN, LAYERS, VOCABULARY = 768, 10, 8192
MIB = 1 << 20


def a_large_model() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=3072,
            num_hidden_layers=LAYERS,
            num_attention_heads=12,
            num_key_value_heads=12,
            head_dim=64,
            tie_word_embeddings=True,
        )
    ).eval()


def peak(ranks: Ranks, work: tuple[str, bool]) -> float:
    """Have this rank's part of a model, read in parts or whole; returns how many bytes that took at most."""
    directory, is_whole = Path(work[0]), work[1]
    # What a process takes for its first model is not the model's.
    shard(ARCHITECTURES["Qwen3"](), ranks)
    in_parts(directory)
    gc.collect()
    before, _ = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    if is_whole:
        shard(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), ranks)
    else:
        loaded = in_parts(directory)
        assert loaded.stored is not None
        shard(loaded.model, ranks)
        loaded.stored.fill(loaded.model, ranks.home, ranks.device)
    return _resident()[1] - before


def _resident() -> tuple[float, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (float(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


@pytest.mark.long
def test_a_rank_never_has_more_than_its_part_and_a_layer(tmp_path: Path) -> None:
    model: Any = a_large_model()
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    embedding = model.get_input_embeddings().weight.numel() * 4
    model.save_pretrained(tmp_path)
    assert whole > 380 * MIB

    part, full = (max(run_ranks(peak, (str(tmp_path), is_whole))) for is_whole in (False, True))

    print(f"whole {whole / MIB:.0f}; a rank of two takes {part / MIB:.0f} in parts, {full / MIB:.0f} read whole (MiB)")
    assert part < whole / 2 + layer + embedding
    assert part < 0.6 * full
