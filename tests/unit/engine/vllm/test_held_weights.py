"""What a vLLM worker tells of its weights: those that a layer has packed are read back to the last bit."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flotilla.services.rollout.engines.servers.proof import ServerProof
from flotilla.services.rollout.engines.vllm.engine import EXTENSION, HASHES, VllmDialect, VllmProver
from flotilla.services.rollout.engines.vllm.held_weights import TWO, HeldWeights
from flotilla.shared.errors import WeightsDiverged
from tests.contract.engine.conftest import server_settings

NUM_INPUTS = 600
"""More than are asked for at a time."""


class Packed(torch.nn.Module):
    """A layer as vLLM has it on a CPU: its kernel alone has the weight."""

    def __init__(self, weight: torch.Tensor, *, keeps: bool = False) -> None:
        super().__init__()
        self.packed = [weight.T.contiguous().clone()]
        self.weight = torch.nn.Parameter(weight if keeps else torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]

    def pack(self) -> None:
        self.packed = [self.weight.T.contiguous().clone()]

    def cpu_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x @ self.packed[0]


def a_worker(**modules: torch.nn.Module) -> HeldWeights:
    model = torch.nn.ModuleDict(modules)
    worker = HeldWeights()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    return worker


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_read_back_to_the_last_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(7, NUM_INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = Packed(weight)

    assert a_worker(proj=layer).flotilla_hashes() == {"proj.weight": sha(weight)}
    layer.packed[0].view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)[11] ^= 1
    assert a_worker(proj=layer).flotilla_hashes() != {"proj.weight": sha(weight)}


def test_a_weight_that_is_held_twice_has_to_be_the_same_twice_and_padding_is_left_out() -> None:
    weight = torch.randn(8, 4)
    head = Packed(weight, keeps=True)
    head.org_vocab_size = 5  # type: ignore[assignment]

    assert a_worker(head=head).flotilla_hashes() == {"head.weight": sha(weight[:5])}
    head.packed[0][0, 0] += 1
    assert a_worker(head=head).flotilla_hashes() == {"head.weight": TWO}


def test_a_head_that_is_the_embedding_is_packed_anew_and_other_layers_are_not() -> None:
    weight, other = torch.randn(8, 4), Packed(torch.randn(8, 4), keeps=True)
    embedding, head = Packed(weight, keeps=True), Packed(weight, keeps=True)
    head.weight = embedding.weight
    for layer in (embedding, head, other):
        layer.quant_method = SimpleNamespace(process_weights_after_loading=Packed.pack)  # type: ignore[assignment]
    worker = a_worker(embedding=embedding, head=head, other=other)
    for layer in (embedding, other):
        layer.weight.data += 1
    stale = other.packed[0].clone()

    assert worker.flotilla_pack_tied() == ["embedding", "head"]

    assert torch.equal(head.packed[0].T, weight) and torch.equal(embedding.packed[0].T, weight)
    assert torch.equal(other.packed[0], stale)


class Server:
    """Answers as a vLLM server whose worker tells its weights."""

    def __init__(self, worker: HeldWeights) -> None:
        self.worker = worker

    async def post(self, path: str, body: Mapping[str, Any] | None, *, seconds: float | None = None) -> Any:
        assert (path, body) == ("/collective_rpc", {"method": HASHES})
        return {"results": [self.worker.flotilla_hashes()]}

    async def get(self, path: str, *, seconds: float | None = None) -> Any:
        raise AssertionError(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_zeros_of_either_sign_are_the_same_weight_and_another_one_is_named(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weight = torch.tensor([[0.5, -0.0], [0.0, -1.0]], dtype=dtype)
    save_file({"proj.weight": weight}, tmp_path / "model.safetensors")
    layer = Packed(weight)
    server = Server(a_worker(proj=layer))
    proof = ServerProof(VllmProver(), str(dtype).removeprefix("torch."), 1.0)

    await proof.learn(server, tmp_path)
    assert proof.can_tell
    await proof.check(server, tmp_path, 3)
    layer.packed[0][0, 0] = 0.25
    with pytest.raises(WeightsDiverged, match=r"0 of 1 tensors are right, the first that differs is proj\.weight"):
        await proof.check(server, tmp_path, 4)


@pytest.mark.parametrize(
    ("embedding", "head", "written"),
    [
        ("model.embed_tokens", "lm_head", "model.embed_tokens"),
        ("language_model.model.embed_tokens", "language_model.lm_head", "model.language_model.embed_tokens"),
    ],
)
async def test_a_head_that_is_the_embedding_is_held_against_it(
    tmp_path: Path, embedding: str, head: str, written: str
) -> None:
    weight = torch.randn(8, 4)
    layers = {name: Packed(weight.clone(), keeps=True) for name in (embedding, head)}
    layers[head].weight = layers[embedding].weight
    worker = HeldWeights()
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(named_modules=layers.items))
    server, proof = Server(worker), ServerProof(VllmProver(), "float32", 1.0)
    save_file({f"{written}.weight": weight}, tmp_path / "model.safetensors")
    await proof.learn(server, tmp_path)
    await proof.check(server, tmp_path, 1)

    layers[embedding].weight.data += 1
    layers[embedding].pack()
    save_file({f"{written}.weight": weight + 1}, tmp_path / "model.safetensors")

    with pytest.raises(WeightsDiverged, match=rf"1 of 2 tensors are right, the first that differs is {head}\.weight"):
        await proof.check(server, tmp_path, 2)
    layers[head].pack()
    await proof.check(server, tmp_path, 2)


def test_a_server_of_ours_on_a_cpu_is_started_with_what_tells_its_weights(tmp_path: Path) -> None:
    settings = server_settings(tmp_path, "vllm", python=Path("/usr/bin/python3"))
    launch = VllmDialect(raw=False).launch(settings, tmp_path, 128, "v0")

    assert f"{EXTENSION}.HeldWeights" in " ".join(launch.arguments)
    assert "class HeldWeights" in launch.files[f"{EXTENSION}.py"]
    assert launch.environment["PYTHONPATH"].split(":")[0] == str(tmp_path)
