"""What leaves memory comes back bit by bit, and tensors stay what they are."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flotilla.services.trainer.models.offloading import Offloader
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.errors import Unavailable


def test_weights_and_moments_come_back_and_training_goes_on_as_without(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(256, 256), nn.Linear(256, 256)
    twin.load_state_dict(model.state_dict())
    FlatParameters(model)
    optimizers = [PolicyOptimizer(each.named_parameters(), OptimisationConfig(steps=9), 9) for each in (model, twin)]
    inputs = torch.randn(8, 256)
    offloader = Offloader(tmp_path)

    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            torch.autograd.backward(each(inputs).square().mean())
            optimizer.update()
        offloader.offload([*model.parameters(), *optimizers[0].state().values()])
        assert model.weight.untyped_storage().nbytes() == 0
        assert offloader.num_bytes >= 3 * 256 * 256 * 4
        assert list(tmp_path.iterdir()) == []
        offloader.reload()
        assert offloader.num_bytes == 0

    assert torch.equal(model.weight, twin.weight)
    moments = [optimizer.state()["exp_avg_sq/weight"] for optimizer in optimizers]
    assert torch.equal(*moments)


def test_where_the_disk_has_no_room_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    tensor = torch.ones(1 << 16)

    with pytest.raises(Unavailable, match="No space left"):
        Offloader(tmp_path).offload([tensor])

    assert tensor.sum() == 1 << 16
