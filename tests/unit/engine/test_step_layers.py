"""A decode step's kernels give what torch's operators give; where they cannot, those compute."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders import step_layers
from flotilla.services.rollout.engines.decoders.architecture import architecture_of
from flotilla.services.rollout.engines.decoders.checkpoint import open_tensors, read_config
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights
from flotilla.services.rollout.engines.decoders.step_layers import TorchStep, TritonStep, agree
from flotilla.services.rollout.engines.decoders.torch_layers import rotations
from flotilla.services.rollout.engines.embedded import sampling
from flotilla.services.rollout.engines.embedded.sampling import RowSampling, _sample_by_torch
from flotilla.shared.models.weight_files import safetensors_files
from tests.contract.engine.models import save_model

CPU = torch.device("cpu")


def loaded(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[TorchStep, FusedWeights]:
    save_model(family, directory)
    sizes = architecture_of(read_config(directory))
    weights = FusedWeights(sizes, dtype, CPU)
    with open_tensors(safetensors_files(directory)) as source:
        weights.fill(source)
    return TorchStep(sizes, rotations(sizes, 32), dtype), weights


def test_another_rotation_is_found_out(tmp_path: Path) -> None:
    step, weights = loaded("qwen3", tmp_path)
    sizes = architecture_of(read_config(tmp_path))
    other = TorchStep(sizes, rotations(replace(sizes, rope_theta=3.0), 32), torch.float32)

    assert agree(step, step, sizes, weights.layers[0])
    assert not agree(other, step, sizes, weights.layers[0])


def test_weights_that_are_no_numbers_choose_torch(tmp_path: Path) -> None:
    step, weights = loaded("qwen3", tmp_path)
    weights.layers[0].input_norm.fill_(torch.nan)

    assert not agree(step, step, architecture_of(read_config(tmp_path)), weights.layers[0])


class OnGpu:
    """Rotations that say that they are on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("outcome", ["works", "differs", "fails", "is missing"])
def test_the_kernels_serve_where_they_work(outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = loaded("qwen3", tmp_path)
    sizes = architecture_of(read_config(tmp_path))

    def tried(*_: object) -> bool:
        if outcome == "fails":
            raise RuntimeError("no C compiler")
        return outcome == "works"

    class Fast:
        def __init__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(step_layers, "TritonStep", Fast)
    monkeypatch.setattr(step_layers, "agree", tried)
    monkeypatch.setattr(step_layers, "find_spec", lambda _: None if outcome == "is missing" else object())

    found = step_layers.step_layers(sizes, OnGpu(), torch.bfloat16, weights.layers[0])  # type: ignore[arg-type]

    assert isinstance(found, Fast if outcome == "works" else TorchStep)


INTERPRETED = """
import sys
from pathlib import Path
import torch
from tests.unit.engine.test_step_layers import compare, compare_sampling
# Its interpreter cuts bfloat16 off instead of rounding.
for dtype in (torch.float32, torch.float16):
    compare(sys.argv[1], Path(sys.argv[2]), dtype)
compare_sampling()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen2", "qwen3"])
def test_the_kernels_compute_what_torch_computes(family: str, tmp_path: Path) -> None:
    """By Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""
    command = [sys.executable, "-c", INTERPRETED, family, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def compare(family: str, directory: Path, dtype: torch.dtype) -> None:
    step, weights = loaded(family, directory, dtype)
    sizes = architecture_of(read_config(directory))
    fast = TritonStep(sizes, rotations(sizes, 32), dtype)
    positions, slots = torch.tensor([5, 0, 31, 7]), torch.tensor([3, 9, 1, 0])
    random = torch.Generator().manual_seed(1)
    tolerance = {"atol": 2e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    with torch.inference_mode():
        for layer in weights.layers:
            if layer.qkv.bias is not None:
                layer.qkv.bias.normal_(generator=random)
            hidden = torch.randn((4, sizes.hidden_size), generator=random).to(dtype)
            found = []
            for each in (step, fast):
                pools = torch.zeros((2, 3, 4, sizes.num_kv_heads, sizes.head_dim), dtype=dtype)
                queries = each.project(hidden, layer, positions, slots, (pools[0], pools[1]))
                fed = hidden.clone()
                each.feed(fed, queries.reshape(4, -1), layer)
                found.append((queries, pools, fed))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, **tolerance)
            assert set(found[0][1][0].abs().sum((2, 3)).flatten().nonzero().flatten().tolist()) == {0, 1, 3, 9}


def compare_sampling() -> None:
    from flotilla.services.rollout.engines.decoders import triton_kernels

    random = torch.Generator().manual_seed(2)
    for vocabulary in (7, 4096, 9001):
        logits = 3 * torch.randn((5, vocabulary), generator=random)
        draws = torch.tensor([0.0, 0.2, 0.5, 0.9, 1 - 2.0**-52], dtype=torch.float64)
        temperatures = torch.tensor([1.0, 0.3, 2.0, 0.7, 1.0])
        # What is impossible is not sampled, at neither end.
        logits[0, : vocabulary // 2], logits[4, -(vocabulary // 2) :] = -torch.inf, -torch.inf
        for given in (None, temperatures):
            tokens, log_probs = triton_kernels.sample(logits, draws, given)
            wanted = _sample_by_torch(logits, draws, RowSampling(temperatures=given))
            assert tokens.tolist() == wanted[0].tolist()
            torch.testing.assert_close(log_probs, wanted[1], atol=2e-5, rtol=1e-5)
    broken = torch.zeros((3, 5000))
    broken[0, 4500], broken[1, 3], broken[2] = torch.nan, torch.inf, -torch.inf
    tokens, log_probs = triton_kernels.sample(broken, torch.full((3,), 0.5, dtype=torch.float64), None)
    assert not log_probs.isfinite().any() and ((tokens >= 0) & (tokens < 5000)).all()


def test_a_sampler_that_is_off_is_found_out() -> None:
    def shifted(logits: Tensor, draws: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, log_probs = _sample_by_torch(logits, draws, RowSampling(temperatures=temperatures))
        return tokens + 1, log_probs

    def exact(logits: Tensor, draws: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        return _sample_by_torch(logits, draws, RowSampling(temperatures=temperatures))

    for dtype in (torch.float32, torch.bfloat16):
        assert sampling._samples_alike(exact, CPU, dtype)
        assert not sampling._samples_alike(shifted, CPU, dtype)
