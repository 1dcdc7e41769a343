"""Sizes of the models that a trainer loads beside the policy: teachers, and what a critic begins as."""

from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.sizes.model import ModelSizes, read_sizes


def read_others(spec: ExperimentSpec) -> tuple[dict[str, ModelSizes], list[str]]:
    """Read them, by the dotted field of their path, and list the fields of those that cannot be. Blocks for headers."""
    found: dict[str, ModelSizes] = {}
    unknown: list[str] = []
    for field, model in other_models(spec).items():
        try:
            found[field] = read_sizes(model_directory(model))
        except ModelError:
            unknown.append(field)
    return found, unknown
