"""What a checkpoint says about itself: the contents of its ``state.json``."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.config.spec import ExperimentSpec
from shared.errors import ModelError

CHECKPOINT_SCHEMA: Final = 1
SOFTWARE = ("flotilla", "torch", "transformers", "safetensors", "numpy")

FIXED_FIELDS = (
    ("model", "path"),
    ("model", "dtype"),
    ("asynchrony", "trigger_parameter_sync_step"),
    ("optimisation", "groups_per_mini_batch"),
    ("asynchrony", "require_batches"),
)
"""Settings that a checkpoint cannot be continued without: they define the weights, the versions and the steps."""


class CheckpointState(BaseModel):
    """Everything of a checkpoint but tensors. Times are not in it: the same training gives the same file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    schema_version: Literal[1] = CHECKPOINT_SCHEMA
    experiment_id: str
    step: int = Field(ge=1)
    version: int = Field(ge=0)
    """Policy version that the weights are, or, between two publications, that they are trained from."""
    updates: int = Field(ge=0)
    """Optimiser updates done."""
    trained: list[list[int]]
    """Ids of all groups trained in this lineage, as closed intervals."""
    seed: int
    """What the losses draw in a step is seeded by this and the step's number: no generator's state needs keeping."""
    kl_coefficient: float | None
    totals: Mapping[str, int]
    """Figures that grow over the experiment."""
    spec: Mapping[str, Any]
    software: Mapping[str, str]
    files: Mapping[str, int]
    """Size in bytes of each file: a checkpoint with another file size is not complete."""


def software_versions() -> dict[str, str]:
    """List the versions of what wrote a checkpoint."""
    found = {}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            continue
    return found


def check_same_lineage(state: CheckpointState, spec: ExperimentSpec) -> None:
    """Refuse to go on from a checkpoint under settings that do not fit it.

    Raises:
        ModelError: a setting differs; it is named with both values and the way out.
    """
    now = spec.model_dump(mode="json")
    for section, key in FIXED_FIELDS:
        before, after = state.spec.get(section, {}).get(key), now[section][key]
        if before != after:
            raise ModelError(
                f"checkpoint of step {state.step} was made with {section}.{key} {before!r}, the spec now says "
                f"{after!r}: set it back, or start a new experiment from the checkpoint's model directory"
            )
