"""The experiment spec: one strict tree, validated where there is no torch."""

from typing import Any, Self

from pydantic import model_validator

from flotilla.shared.config.rules.cross_section import check_sections
from flotilla.shared.config.rules.devices import check_devices, devices_of_engine, with_ranks_of_devices
from flotilla.shared.config.rules.jobs import check_job, check_profiler, with_defaults_of_the_job
from flotilla.shared.config.sections.job import SftConfig
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.tree import Sections


class ExperimentSpec(Sections):
    """All that defines an experiment."""

    @property
    def engine_ranks(self) -> int:
        """Ranks that each engine has in a weight group that it is a member of."""
        asked = self.resources.rollouts.devices
        return devices_of_engine(self) if asked == "auto" else asked

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_job(cls, given: Any) -> Any:
        return with_ranks_of_devices(with_defaults_of_the_job(given))

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_job(self)
        check_profiler(self.tracking.profiler, self)
        check_sections(self)
        check_devices(self)
        return self


def other_models(spec: ExperimentSpec) -> dict[str, ModelConfig]:
    """List the models that the trainer loads beside the policy, by the dotted field of their path."""
    return spec.algorithm.models | (spec.job.models if isinstance(spec.job, SftConfig) else {})
