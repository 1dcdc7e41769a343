"""An exponential moving average of the weights that train, in float32: updated after every optimiser update."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flotilla.services.trainer.weights.parts import local_of, localized
from flotilla.shared.errors import ModelError


class WeightAverage:
    """``average = decay * average + (1 - decay) * weight``, beginning as the weights are.

    Args:
        weights: by name, float32; sharded ones are averaged shard by shard.
        decay: at least 0 and below 1.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], decay: float) -> None:
        self._weights, self._decay = weights, decay
        self._averages: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Begin again with the weights as they are now."""
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        for name, average in self._averages.items():
            local_of(average).lerp_(local_of(self._weights[name].detach()), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return the averages by name."""
        return dict(self._averages)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned.

        Raises:
            ModelError: it is of other weights.
        """
        shapes = {name: average.shape for name, average in self._averages.items()}
        if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ModelError("the checkpoint's moving average is of other weights than those that are trained")
        self._averages = {name: localized(tensors[name], self._averages[name]) for name in self._averages}
