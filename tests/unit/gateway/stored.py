"""Checkpoints on disk as a trainer leaves them, but for their tensors."""

from pathlib import Path
from typing import Any

from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, CheckpointState, checksum, sizes

PER_STEP = 2
"""Groups of a step, as ``spec_document`` has them."""


def store_checkpoint(directory: Path, step: int, spec: dict[str, Any], **changes: Any) -> Path:
    """Write the checkpoint of a step into an experiment's directory; every step trained the next two groups."""
    path = directory / CHECKPOINTS / f"step-{step:08d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "model.safetensors").write_text(f"weights of step {step}")
    (path / "optimizer.safetensors").write_text(f"moments of step {step}")
    files = sizes(path)
    fields: dict[str, Any] = {
        "experiment_id": directory.name,
        "step": step,
        "version": step,
        "published_step": step,
        "updates": step,
        "trained": [[0, PER_STEP * step - 1]],
        "seed": 0,
        "kl_coefficient": None,
        "totals": {},
        "spec": spec,
        "software": {},
        "files": files,
        "checksums": {name: checksum(path / name) for name in files},
    }
    (path / STATE_FILE).write_text(CheckpointState(**(fields | changes)).model_dump_json())
    return path
