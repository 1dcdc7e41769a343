"""The same reward for every answer."""

from collections.abc import Sequence

from flotilla.shared.config.sections.reward import ConstantConfig
from flotilla.shared.schemas.grading import Grade, GradingSample


class ConstantVerifier:
    """Looks at nothing."""

    def __init__(self, config: ConstantConfig) -> None:
        self._config = config

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample with the reward that the spec names."""
        return [Grade.scored(self._config.value) for _ in samples]

    async def aclose(self) -> None:
        """Nothing is held."""
