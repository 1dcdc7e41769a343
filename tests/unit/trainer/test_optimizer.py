import math

import pytest
import torch
from torch import nn

from flotilla.services.trainer.models.optimizer import PolicyOptimizer, learning_rate_at
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.errors import ModelError


def a_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def with_gradient(layer: nn.Linear, scale: float = 1.0) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, scale)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 6),
        ({"warmup_updates": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
        ({"schedule": "linear", "warmup_updates": 1, "min_learning_rate_ratio": 0.2}, [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * u / 5)) for u in range(6)]),
        ({"schedule": "linear", "warmup_updates": 6}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0]),
    ],
)
def test_the_schedule_warms_up_and_ends_at_the_last_update(settings: dict[str, object], expected: list[float]) -> None:
    config = OptimisationConfig(steps=6, learning_rate=1.0, **settings)

    assert [learning_rate_at(update, 6, config) for update in range(6)] == pytest.approx(expected)


def test_a_cosine_of_a_whole_wave_rises_again_between_peak_and_floor() -> None:
    config = OptimisationConfig(steps=5, learning_rate=1.0, schedule="cosine", warmup_updates=1, cosine_cycles=1.0,
                                min_learning_rate_ratio=0.2)  # fmt: skip

    rates = [learning_rate_at(update, 5, config) for update in range(5)]

    assert rates == pytest.approx([1.0, 1.0, 0.4, 0.4, 1.0])  # 0.6 + 0.4 cos(2 pi/3) in between


MEGATRON_WSD = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1),
    "exponential": lambda share: 2 * math.pow(0.5, share) - 1,
    "minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""Megatron's coefficients of WSD by the share of the fall that is over."""


@pytest.mark.parametrize("style", MEGATRON_WSD)
def test_wsd_stays_at_its_peak_and_falls_over_the_last_updates_as_megatrons(style: str) -> None:
    config = OptimisationConfig(steps=12, learning_rate=1.0, schedule="wsd", warmup_updates=2, wsd_decay_updates=4,
                                wsd_decay=style, min_learning_rate_ratio=0.1)  # fmt: skip
    falling = [0.1 + 0.9 * MEGATRON_WSD[style](number / 4) for number in range(1, 5)]

    rates = [learning_rate_at(update, 12, config) for update in range(12)]

    assert rates == pytest.approx([0.5, 1.0, *[1.0] * 6, *falling])


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_sqrt_falls_from_the_warm_ups_end_to_its_floor(warmup: int) -> None:
    config = OptimisationConfig(steps=40, learning_rate=2.0, schedule="inverse_sqrt", warmup_updates=warmup,
                                min_learning_rate_ratio=0.2)  # fmt: skip

    for update in range(warmup, 40):
        expected = max(0.4, 2.0 * math.sqrt(max(warmup, 1)) / math.sqrt(update + 1))
        assert learning_rate_at(update, 40, config) == pytest.approx(expected)


def test_a_fall_ends_where_it_is_said_to_and_stays_there() -> None:
    config = OptimisationConfig(steps=8, learning_rate=1.0, schedule="linear", warmup_updates=1, decay_updates=5,
                                min_learning_rate_ratio=0.2)  # fmt: skip

    rates = [learning_rate_at(update, 8, config) for update in range(8)]

    assert rates == pytest.approx([1.0, 1.0, 1 - 0.8 / 3, 1 - 1.6 / 3, 0.2, 0.2, 0.2, 0.2])


def test_warm_up_rises_from_its_start() -> None:
    config = OptimisationConfig(steps=5, learning_rate=1.0, warmup_updates=4, warmup_start_ratio=0.2)

    rates = [learning_rate_at(update, 5, config) for update in range(5)]

    assert rates == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"decay_updates": 5}, "decay_updates"), ({"schedule": "inverse_sqrt", "decay_updates": 5}, "decay_updates"),
     ({"schedule": "wsd"}, "wsd_decay_updates"), ({"wsd_decay_updates": 5}, "wsd_decay_updates"),
     ({"wsd_decay": "linear"}, "wsd_decay"), ({"warmup_start_ratio": 0.5}, "warmup_updates"),
     ({"decay_all": True}, "weight_decay"),
     ({"schedule": "linear", "decay_updates": 4, "warmup_updates": 4},
      r"decay_updates \(4\).*optimisation.warmup_updates \(4\)")],
)  # fmt: skip
def test_a_key_of_the_schedule_without_effect_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"optimisation.{named}"):
        OptimisationConfig(steps=5, **settings)


@pytest.mark.parametrize("decays_all", [False, True])
def test_weight_decay_reaches_biases_where_it_is_to(decays_all: bool) -> None:
    config = OptimisationConfig(steps=3, learning_rate=0.1, weight_decay=0.5, decay_all=decays_all)
    layer = a_layer()
    before = layer.bias.detach().clone()
    optimizer = PolicyOptimizer(layer.named_parameters(), config, 3)

    optimizer.add_zero()
    optimizer.update()

    torch.testing.assert_close(layer.bias.detach(), before * (0.95 if decays_all else 1.0))


def test_an_update_is_that_of_adamw_with_a_clip() -> None:
    config = OptimisationConfig(steps=3, learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0)
    layer, plain = a_layer(), a_layer()
    optimizer = PolicyOptimizer(layer.named_parameters(), config, 3)
    reference = torch.optim.AdamW(
        [{"params": [plain.weight], "weight_decay": 0.5}, {"params": [plain.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )

    for scale in (3.0, -1.0):
        with_gradient(layer, scale)
        result = optimizer.update()
        with_gradient(plain, scale)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()

        assert result.grad_norm == pytest.approx(float(norm))
    torch.testing.assert_close(layer.weight, plain.weight)
    torch.testing.assert_close(layer.bias, plain.bias)


def test_a_gradient_that_is_not_finite_is_thrown_away() -> None:
    layer = a_layer()
    optimizer = PolicyOptimizer(layer.named_parameters(), OptimisationConfig(steps=3, learning_rate=0.1), 3)
    before = layer.weight.detach().clone()
    with_gradient(layer, float("nan"))

    result = optimizer.update()

    assert not result.is_applied
    assert torch.equal(layer.weight, before)
    assert optimizer.updates == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_bit_by_bit(dtype: torch.dtype) -> None:
    config = OptimisationConfig(steps=9, learning_rate=0.01, schedule="cosine")
    layer = a_layer().to(dtype)
    optimizer = PolicyOptimizer(layer.named_parameters(), config, 9)
    with_gradient(layer)
    optimizer.collect()
    optimizer.update()
    restored_layer = a_layer().to(dtype)
    restored_layer.load_state_dict(layer.state_dict())
    restored = PolicyOptimizer(restored_layer.named_parameters(), config, 9)

    restored.load({name: tensor.clone() for name, tensor in optimizer.state().items()}, optimizer.updates)
    for each, parameters in ((optimizer, layer), (restored, restored_layer)):
        with_gradient(parameters, 0.5)
        each.collect()
        each.update()

    assert torch.equal(layer.weight, restored_layer.weight)
    states = optimizer.state(), restored.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_loaded_state_is_on_the_parameters_device() -> None:
    """The fused kernel for CUDA takes step counts on its parameter's device only; a checkpoint is read to the CPU."""
    layer = a_layer()
    optimizer = PolicyOptimizer(layer.named_parameters(), OptimisationConfig(steps=2), 2)
    with_gradient(layer)
    optimizer.update()
    stored = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    on_device = PolicyOptimizer(a_layer().to("meta").named_parameters(), OptimisationConfig(steps=2), 2)

    on_device.load(stored, 1)

    loaded = on_device.state()
    assert loaded.keys() == stored.keys()
    assert {name: tensor.device.type for name, tensor in loaded.items()} == dict.fromkeys(stored, "meta")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == dict.fromkeys(stored, torch.float32)


def test_state_of_another_model_is_refused() -> None:
    optimizer = PolicyOptimizer(a_layer().named_parameters(), OptimisationConfig(steps=1), 1)

    with pytest.raises(ModelError, match="which the model does not have"):
        optimizer.load({"exp_avg/other.weight": torch.zeros(1)}, 1)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    layer = a_layer().bfloat16()
    optimizer = PolicyOptimizer(layer.named_parameters(), OptimisationConfig(steps=1, max_grad_norm=None), 1)

    for scale in (1.0, 1 / 512, 1 / 512):
        with_gradient(layer, scale)
        optimizer.collect()

    assert optimizer.update().grad_norm == pytest.approx((1 + 2 / 512) * math.sqrt(15), rel=1e-6)


def test_a_models_own_bfloat16_weights_are_trained_where_the_spec_says_so() -> None:
    layer, plain = a_layer().bfloat16(), a_layer().bfloat16()
    config = OptimisationConfig(steps=3, learning_rate=0.1, max_grad_norm=None, masters="model")
    optimizer = PolicyOptimizer(layer.named_parameters(), config, 3)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    for scale in (1.0, 0.5):
        with_gradient(layer, scale)
        with_gradient(plain, scale)
        optimizer.collect()
        optimizer.update()
        reference.step()

    assert torch.equal(layer.weight, plain.weight)
    assert {each.dtype for name, each in optimizer.state().items() if not name.startswith("step/")} == {torch.bfloat16}
    assert not any(name.startswith("master/") for name in optimizer.state())


@pytest.mark.parametrize(("before", "after"), [("float32", "model"), ("model", "float32")])
def test_state_of_masters_of_another_type_goes_on(before: str, after: str) -> None:
    layer = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    first, second = (
        PolicyOptimizer(layer.named_parameters(), OptimisationConfig(steps=3, learning_rate=0.1, masters=each), 3)
        for each in (before, after)
    )
    for optimizer in (first, second):
        with_gradient(layer, 1.0)
        optimizer.collect()
        optimizer.update()
        if optimizer is first:
            second.load(first.state(), first.updates)

    moments = {name: each for name, each in second.state().items() if name.startswith("exp_avg")}
    assert {each.dtype for each in moments.values()} == {next(iter(second.masters.values())).dtype}
    assert second.state()["step/weight"] == 2
