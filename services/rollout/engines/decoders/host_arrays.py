"""Arrays of the host on their way to a device."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, behind what that has been given before: the host does not wait for it.

    The array may be written to afterwards. From memory that is not pinned, a GPU's copy would wait for everything that
    was launched, and steps could not be launched ahead.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)
