"""Parameters as views of flat buffers: the same training, one copy per snapshot."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.shared.errors import Conflict
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.tensors import open_image


class TiedModel(nn.Module):
    """A language model in miniature, its output layer tied to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.mixer = nn.Linear(16, 16).to(torch.bfloat16)
        self.register_buffer("positions", torch.arange(4))
        self.lm_head.weight = self.embed.weight
        self.all_tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.lm_head(hidden + self.mixer(hidden.to(torch.bfloat16)).float())


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


@pytest.fixture
def image(tmp_path: Path, model: TiedModel) -> Iterator[WeightImage]:
    flat = FlatParameters(copy.deepcopy(model))
    with WeightImage.create(flat.layout.image_bytes, directory=tmp_path) as made:
        yield made


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    tokens = torch.arange(24).reshape(3, 8)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_the_same_with_flat_parameters(model: TiedModel) -> None:
    flat_model = copy.deepcopy(model)
    early = torch.optim.AdamW(flat_model.parameters(), lr=1e-2)
    expected = _losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4)

    FlatParameters(flat_model)

    assert _losses(flat_model, early, 4) == expected
    assert expected[-1] < expected[0]
    for name, parameter in flat_model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_snapshot_holds_each_weight_once_under_its_checkpoint_name(model: TiedModel, image: WeightImage) -> None:
    flat = FlatParameters(model)

    flat.snapshot_into(image)

    read = load_file(image.path)
    assert read.keys() == {"embed.weight", "norm.weight", "norm.bias", "mixer.weight", "mixer.bias"}
    for name, tensor in read.items():
        assert tensor.dtype == model.get_parameter(name).dtype
        assert torch.equal(tensor, model.get_parameter(name))


def test_tied_weights_stay_tied(model: TiedModel) -> None:
    FlatParameters(model)

    with torch.no_grad():
        model.embed.weight[0, 0] = 7.0

    assert model.lm_head.weight[0, 0] == 7.0
    assert model.lm_head.weight is model.embed.weight


def test_two_parameters_of_one_memory_count_once(model: TiedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.embed.weight.data)

    flat = FlatParameters(model)

    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert [spec.name for spec in flat.layout.tensors].count("embed.weight") == 1
    assert "lm_head.weight" not in {spec.name for spec in flat.layout.tensors}


def test_parameters_are_views_of_one_buffer_per_dtype(model: TiedModel) -> None:
    flat = FlatParameters(model)

    assert flat.buffers.keys() == {torch.float32, torch.bfloat16}
    for parameter in model.parameters():
        assert parameter.untyped_storage().data_ptr() == flat.buffers[parameter.dtype].data_ptr()


def test_a_snapshot_follows_the_optimizer(model: TiedModel, image: WeightImage) -> None:
    flat = FlatParameters(model)
    _losses(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    flat.snapshot_into(image)

    assert torch.equal(load_file(image.path)["norm.weight"], model.norm.weight)
    assert not torch.equal(model.norm.weight, torch.ones(16))


def test_weights_may_be_cast_on_the_wire(model: TiedModel, tmp_path: Path) -> None:
    flat = FlatParameters(model, wire_dtype=torch.bfloat16)

    with WeightImage.create(flat.layout.image_bytes, directory=tmp_path) as image:
        flat.snapshot_into(image)
        read = load_file(image.path)

    for name, tensor in read.items():
        assert torch.equal(tensor, model.get_parameter(name).to(torch.bfloat16))
    assert model.embed.weight.dtype == torch.float32


def test_another_module_takes_over_an_image(model: TiedModel, image: WeightImage) -> None:
    FlatParameters(model).snapshot_into(image)
    torch.manual_seed(1)
    other = TiedModel()

    FlatParameters(other).load_from(image)

    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_an_image_of_another_model_is_refused(model: TiedModel, image: WeightImage) -> None:
    FlatParameters(model).snapshot_into(image)

    with pytest.raises(ValueError, match="other tensors"):
        FlatParameters(nn.Linear(2, 2)).load_from(image)
    with pytest.raises(ValueError, match="bytes"):
        FlatParameters(nn.Linear(2, 2)).snapshot_into(image)


def test_a_snapshot_never_changes_what_somebody_reads(model: TiedModel, image: WeightImage) -> None:
    flat = FlatParameters(model)
    flat.snapshot_into(image)
    opened = open_image(image.path)

    with pytest.raises(Conflict):
        flat.snapshot_into(image)

    assert torch.equal(opened["norm.weight"], model.norm.weight)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Identity(), "no parameters"),
        (nn.Linear(2, 2, device="meta"), "one real device"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    ],
)
def test_modules_that_cannot_be_flat_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatParameters(module)


def test_weights_as_published_are_those_that_a_receiver_loads() -> None:
    flat = FlatParameters(nn.Linear(8, 8), wire_dtype=torch.bfloat16)

    published = flat.copies(as_published=True)["float32"]

    buffer = flat.buffers[torch.float32]
    assert published.dtype is torch.float32
    assert torch.equal(published, buffer.to(torch.bfloat16).to(torch.float32))
    assert not torch.equal(published, buffer)
