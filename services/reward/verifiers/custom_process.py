"""A user's function as a verifier, in a process of its own that knows no secret of the service.

``CustomProcessVerifier`` calls from the service; ``CustomVerifier`` runs in the process.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flotilla.shared.children.calls import START_SECONDS, CallProcess
from flotilla.shared.children.custom_code import describe, load_callable
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.serving import serve
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.errors import FlotillaError, InvalidSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.reward_number import reward_number

GradingFunction = Callable[[GradingSample], Any]
WHAT = "custom verifier"


def load_function(reference: str) -> GradingFunction:
    """Load ``file.py:function``; a relative path starts at the working directory.

    Raises:
        InvalidSpec: there is no such file, importing it fails, or it has no such function of one argument.
    """
    function = load_callable(reference, what=WHAT, kind="function", accepts=inspect.isfunction)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InvalidSpec(
            f"{WHAT} {reference!r}: it must be callable with one argument, the sample; "
            f"its signature is {reference.rpartition(':')[2]}{inspect.signature(function)}"
        ) from error
    return function


def grade_of(value: object) -> Grade:
    """Make a grade of what a function returned: a number, None (abstain), a Grade, or a mapping with Grade's fields."""
    if value is None:
        return Grade.abstained()
    if isinstance(value, Grade):
        return value
    if isinstance(value, Mapping):
        try:
            return Grade.model_validate(dict(value))
        except ValidationError as error:
            first = error.errors()[0]
            words = first["msg"].removeprefix("Value error, ")
            return Grade.error(f"the function returned a bad grade: {'.'.join(map(str, first['loc']))}: {words}")
    try:
        return Grade.scored(reward_number(value))
    except ValueError as error:
        return Grade.error(f"the function must return a number, None, a mapping or a Grade: {error}")


class CustomVerifier:
    """Calls the function once per sample, all samples at once.

    A plain function runs in a daemon thread of its own. One that exceeds its time gives an error; its thread cannot be
    stopped and continues, so a function that may hang should limit itself.
    """

    def __init__(self, config: CustomConfig) -> None:
        self._timeout_seconds = config.timeout_seconds
        self._function = load_function(config.path)
        self._path = Path(config.path.rpartition(":")[0]).expanduser().resolve()

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by what the function returns; an exception is an error that names its type and line."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """Nothing is held."""

    async def _grade(self, sample: GradingSample) -> Grade:
        scope = asyncio.timeout(self._timeout_seconds)
        try:
            async with scope:
                return grade_of(await self._call(sample))
        except Exception as error:  # whatever the user's function raises is this sample's error
            if isinstance(error, TimeoutError) and scope.expired():
                return Grade.error(f"the function took longer than {self._timeout_seconds:g} s")
            return Grade.error(describe(error, self._path))

    async def _call(self, sample: GradingSample) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(sample)
        value = await on_daemon_thread(lambda: self._function(sample), "custom verifier")
        return await value if inspect.isawaitable(value) else value


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
