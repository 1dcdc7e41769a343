"""Which software wrote a checkpoint, and whether a spec may go on from it."""

from importlib.metadata import PackageNotFoundError, version

from flotilla.shared.checkpoints.folders import CheckpointState
from flotilla.shared.config.sections.lora import with_later_keys
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError

SOFTWARE = ("flotilla", "torch", "transformers", "safetensors", "numpy")

FIXED_FIELDS = (
    ("model", "path"),
    ("model", "dtype"),
    ("model", "lora"),
    ("asynchrony", "trigger_parameter_sync_step"),
    ("optimisation", "groups_per_mini_batch"),
    ("asynchrony", "require_batches"),
)
"""Settings that a checkpoint cannot be continued without: they define the weights, the versions and the steps."""


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
        if key == "lora":
            before = with_later_keys(before)
        if before != after:
            raise ModelError(
                f"checkpoint of step {state.step} was made with {section}.{key} {before!r}, the spec now says "
                f"{after!r}: set it back, or start a new experiment from the checkpoint's model directory"
            )
