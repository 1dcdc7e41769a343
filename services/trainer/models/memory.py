"""How much memory a device has left, and how much a piece of work takes at its peak."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flotilla.services.trainer.models.loading import check_device
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.host.control_groups import available_bytes
from flotilla.shared.models.hub import model_directory
from flotilla.shared.sizes.starting import check_trainer

RESET_PEAK = "5"
"""What Linux takes in ``/proc/self/clear_refs`` for making the highest resident size the present one."""


def free_bytes(device: torch.device) -> int:
    """Count the bytes that a device has for this process; what torch keeps for its next tensors counts as free."""
    if device.type != "cuda":
        return available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(kept)


def check_room(spec: ExperimentSpec) -> None:
    """Refuse to load a model whose training cannot fit into the device's memory, or the host's.

    Not while a checkpoint is read: one that cannot be read is skipped, whatever the free memory.

    Raises:
        ModelError: it needs more than there is, and the message has the arithmetic and keys that would help; or there
            is no such device.
        Unavailable: it needs more of the host's memory than is available now.
    """
    device = check_device(spec.parallelism.device)
    total = int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
    check_trainer(spec, model_directory(spec.model), device=str(device), device_bytes=total)


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", path.read_text(), re.MULTILINE)}


@dataclass
class Peak:
    """What some work took.

    Attributes:
        num_bytes: at its peak, beyond what there was before; None where that cannot be known.
    """

    num_bytes: int | None = None


@contextlib.contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """Measure the work of a block; the figure is there when it has ended without an error."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        yield peak
        return
    resident = _fields(Path("/proc/self/status"))["VmRSS"]
    yield peak
    peak.num_bytes = (_fields(Path("/proc/self/status"))["VmHWM"] - resident) << 10
