"""The check that a process makes of itself before it loads a model: its memory is predicted, and must be there."""

import logging
from pathlib import Path

from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.host.control_groups import available_bytes, limit_bytes
from flotilla.shared.sizes.engine import engine_footprint
from flotilla.shared.sizes.fitting import check_device, check_host
from flotilla.shared.sizes.model import ModelSizes, read_sizes
from flotilla.shared.sizes.parts import Footprint
from flotilla.shared.sizes.trainer import read_others, trainer_footprint

log = logging.getLogger(__name__)


def check_trainer(spec: ExperimentSpec, model: Path, *, device: str, device_bytes: int | None) -> None:
    """Refuse to start a trainer that cannot fit. Blocks for the headers of the model's files.

    Args:
        spec: of the experiment; its device is as it was decided.
        model: directory that the weights are read from.
        device: that it computes on, by torch's name.
        device_bytes: all memory that a GPU has; None on a CPU.

    Raises:
        ModelError, Unavailable: see ``check_host`` and ``check_device``.
    """
    sizes = _sizes(model)
    if sizes is None:
        return
    parallelism = spec.parallelism.model_copy(update={"device": device})
    placed = spec.model_copy(update={"parallelism": parallelism})
    others, _ = read_others(placed)
    _check(trainer_footprint(placed, sizes, free=device_bytes or available_bytes(), others=others), device_bytes)


def check_engine(spec: ExperimentSpec, model: Path) -> None:
    """Refuse to start an embedded engine that cannot fit; others report it themselves. Blocks likewise.

    Raises:
        ModelError, Unavailable: see ``check_host``.
    """
    sizes = _sizes(model)
    footprint = None if sizes is None else engine_footprint(spec, sizes)
    if footprint is not None:
        _check(footprint, None)


def _check(footprint: Footprint, device_bytes: int | None) -> None:
    log.info(
        "memory predicted",
        extra={"what": footprint.name, "bytes": footprint.total, "arithmetic": footprint.arithmetic()},
    )
    check_host(footprint, total=limit_bytes(), available=available_bytes())
    if device_bytes is not None:
        check_device(footprint, device_bytes)


def _sizes(model: Path) -> ModelSizes | None:
    try:
        return read_sizes(model)
    except ModelError as error:
        log.info("memory is not predicted", extra={"why": error.detail})
        return None
