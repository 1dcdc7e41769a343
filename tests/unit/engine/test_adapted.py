"""What an image has instead of whole weights: adapters that fit a base, and numbers that a device multiplies."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flotilla.services.rollout.engines.decoders.adapted import BaseWeights, open_staged
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.models.weight_files import checksum_of
from flotilla.shared.weights.image.adapters import AdaptersHeader, names_of
from flotilla.shared.weights.image.quantised import QUANTISATION, SCALES, Quantisation, dequantise, quantise

WEIGHT = "layer.weight"
LOW, HIGH = torch.ones(2, 4), torch.ones(3, 2)


def staged(directory: Path, low: Tensor, high: Tensor, scale: float = 0.5) -> Tensor:
    base, image = directory / "base.safetensors", directory / "image.safetensors"
    save_file({WEIGHT: torch.zeros(3, 4)}, base)
    header = AdaptersHeader(checksum_of([base]), scale)
    save_file(dict(zip(names_of(WEIGHT), (low, high), strict=True)), image, header.metadata)
    with open_staged(image, None, BaseWeights([base], torch.float32, torch.device("cpu"))) as source:
        return source.read(WEIGHT)


def test_adapters_that_fit_are_added(tmp_path: Path) -> None:
    assert torch.equal(staged(tmp_path, LOW, HIGH), torch.ones(3, 4))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (LOW[0], HIGH),
        (LOW, HIGH[:, 0]),
        (LOW[None], HIGH),
        (torch.tensor(1.0), torch.tensor(1.0)),
        (LOW[:1], HIGH),
        (LOW[:, :3], HIGH),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, low: Tensor, high: Tensor) -> None:
    with pytest.raises(WeightTransferFailed, match="which do not fit"):
        staged(tmp_path, low.contiguous(), high.contiguous())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, scale: float) -> None:
    with pytest.raises(WeightTransferFailed, match="has to be finite"):
        staged(tmp_path, LOW, HIGH, scale)


@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_numbers_of_8_bits_are_multiplied_on_the_device_that_computes(tmp_path: Path, how: Quantisation) -> None:
    numbers, scales = quantise(torch.randn(200, 130), how)
    image = tmp_path / "image.safetensors"
    save_file({WEIGHT: numbers, WEIGHT + SCALES: scales, "norm": torch.ones(3)}, image, {QUANTISATION: how})

    # "meta" has no memory, and tells that what it is given has come to it.
    for name, device in (("cpu", torch.device("cpu")), ("meta", torch.device("meta"))):
        with open_staged(image, None, BaseWeights([image], torch.bfloat16, device)) as source:
            found = source.read(WEIGHT)
            assert (found.device.type, found.dtype, found.shape) == (name, torch.float32, numbers.shape)
            if name == "cpu":
                assert torch.equal(found, dequantise(numbers, scales))
            assert torch.equal(source.read("norm"), torch.ones(3))
