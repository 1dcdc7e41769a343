"""Matrices of 8 bits: what a scale is of, how far a number may be off, and how an image holds both."""

import pytest
import torch

from flotilla.shared.weights.image import quantised
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.quantised import (
    BLOCK,
    SCALES,
    Dequantised,
    Quantisation,
    dequantise,
    layout_of_quantised,
    quantise,
    quantised_specs,
    read_quantisation,
)

HOWS: tuple[Quantisation, ...] = ("int8", "fp8")


def a_weight(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape) * torch.logspace(-3, 1, shape[0])[:, None]


@pytest.mark.parametrize("shape", [(3, 5), (128, 128), (130, 257), (1, 300)])
def test_a_row_of_int8_is_off_by_half_a_step_of_its_scale(shape: tuple[int, int]) -> None:
    weight = a_weight(*shape)
    numbers, scales = quantise(weight, "int8")

    assert numbers.dtype == torch.int8 and scales.shape == (shape[0], 1)
    assert torch.equal(numbers.abs().amax(1), torch.full((shape[0],), 127, dtype=torch.int8))
    assert ((dequantise(numbers, scales) - weight).abs() <= 0.5001 * scales).all()


@pytest.mark.parametrize("shape", [(3, 5), (128, 128), (130, 257), (1, 300)])
def test_a_block_of_fp8_is_off_by_a_sixteenth_of_each_number(shape: tuple[int, int]) -> None:
    weight = a_weight(*shape)
    numbers, scales = quantise(weight, "fp8")

    assert numbers.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    # Three bits of fraction; below the smallest normal number, 2^-6, steps are 2^-9 of the scale.
    bound = torch.maximum(weight.abs() / 16, (scales * 2**-10).max() * torch.ones(()))
    assert ((dequantise(numbers, scales) - weight).abs() <= 1.001 * bound).all()


@pytest.mark.parametrize("how", HOWS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(how: Quantisation) -> None:
    assert torch.equal(dequantise(*quantise(torch.zeros(4, 6), how)), torch.zeros(4, 6))
    broken = torch.ones(4, 6)
    broken[1, 2] = float("nan")

    assert not torch.isfinite(dequantise(*quantise(broken, how))).all()


def multiplied_at_once(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply as torch has it, with a scale beside each number."""
    if numbers.dtype == torch.int8:
        return numbers.float() * scales
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return numbers.float() * spread[: numbers.shape[0], : numbers.shape[1]]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", [(3, 5), (1, 300), (300, 1), (130, 257), (513, 130), (256, 1024)])
def test_numbers_are_multiplied_in_pieces_to_the_bits_of_one_product(
    how: Quantisation, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, scales = quantise(a_weight(*shape), how)
    # Every byte there is, those among them that are no number.
    numbers.view(torch.uint8).flatten()[:256] = torch.arange(256, dtype=torch.uint8)[: numbers.numel()]
    converted, sizes = quantised._as_floats, []
    monkeypatch.setattr(quantised, "PIECE", (1, 4096))
    monkeypatch.setattr(quantised, "_as_floats", lambda part: (sizes.append(part.numel()), converted(part))[1])

    found = dequantise(numbers, scales)

    assert torch.equal(found.view(torch.int32), multiplied_at_once(numbers, scales).view(torch.int32))
    assert sum(sizes) == numbers.numel()
    assert max(sizes) <= max(4096, (1 if how == "int8" else BLOCK) * shape[1])


@pytest.mark.parametrize("how", HOWS)
def test_an_image_has_numbers_and_scales_and_its_reader_whole_weights(how: Quantisation) -> None:
    whole = ImageLayout.of({"a.weight": ((256, 256), "BF16"), "norm.weight": ((256,), "BF16")}, {"said": "1"})
    layout = layout_of_quantised(whole, how)
    weight, norm = a_weight(256, 256), torch.ones(256)
    numbers, scales = quantise(weight, how)
    tensors = Dequantised({"a.weight": numbers, "a.weight" + SCALES: scales, "norm.weight": norm}, how)

    assert layout.image_bytes - len(layout.header) < 0.55 * (whole.image_bytes - len(whole.header))
    assert layout.metadata == {"said": "1", "quantisation": how} and read_quantisation(layout.metadata) == how
    assert [(spec.name, scaled is not None) for spec, scaled in quantised_specs(layout)] == [
        ("norm.weight", False),
        ("a.weight", True),
    ]
    assert set(tensors) == {"a.weight", "norm.weight"} and len(tensors) == 2
    assert torch.equal(tensors["a.weight"], dequantise(numbers, scales)) and tensors["norm.weight"] is norm


def test_an_image_of_a_later_release_is_named() -> None:
    assert read_quantisation({}) is None
    with pytest.raises(ValueError, match="int4"):
        read_quantisation({"quantisation": "int4"})
