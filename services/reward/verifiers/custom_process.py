"""A function of the user's as a verifier, in a process of its own that knows no secret of the service."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from flotilla.services.reward.verifiers.custom import CustomVerifier
from flotilla.shared.children.calls import START_SECONDS, CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.serving import serve
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import FlotillaError
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.grading import Grade, GradingSample


class CustomProcessVerifier:
    """Grades by the function in a child process, all samples at once; a child that died is started again.

    Args:
        config: the file and its function.
        places: where code may be; None: anywhere.

    Raises:
        InvalidSpec: the file is in no folder that the operator allows.
    """

    def __init__(self, config: CustomConfig, places: Places | None) -> None:
        if places is not None:
            places.check_code(config.path, "reward component of kind custom")
        self._config = config
        self.code = CallProcess(python_module(__name__), config.model_dump(mode="json"), "the custom function")

    async def start(self) -> None:
        """Start the process and let it load the function.

        Raises:
            InvalidSpec: there is no such function, or importing the file fails.
            WorkerDied: the process did not start.
        """
        await self.code.start()

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by what the function returns; an exception is an error that names its type and line."""
        try:
            await self.start()
        except FlotillaError as error:
            return [Grade.error(error.detail)] * len(samples)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End the process."""
        await self.code.aclose()

    async def _grade(self, sample: GradingSample) -> Grade:
        try:
            # The function has its time in its own process; what exceeds this has not even been answered there.
            seconds = self._config.timeout_seconds + START_SECONDS
            return Grade.model_validate(await self.code.call(sample.model_dump(mode="json"), seconds=seconds))
        except FlotillaError as error:
            return Grade.error(error.detail)
        except ValidationError:
            return Grade.error("the process of the custom function answered what is no grade")


class _Function:
    about = None

    def __init__(self, opening: Any) -> None:
        self._verifier = CustomVerifier(CustomConfig.model_validate(opening))

    async def handle(self, content: Any) -> object:
        (found,) = await self._verifier.score([GradingSample.model_validate(content)])
        return found.model_dump(mode="json")


if __name__ == "__main__":
    serve(_Function, is_confined=True)
