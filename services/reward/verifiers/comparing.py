"""Comparisons that may never return, in child processes that are killed when they exceed their time.

The grade of such a sample is an error. A child serves one sample at a time; a killed one is replaced before the next
sample.
"""

import asyncio
from collections.abc import Mapping, Sequence

from flotilla.services.reward.verifiers.base import NO_LABEL, verdict
from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module, unheard
from flotilla.shared.config.sections.reward import ComparedConfig, JsonSchemaConfig, MathConfig, RegexConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, GradingFailed, InvalidSpec
from flotilla.shared.schemas.grading import Grade, GradingSample

START_SECONDS = 60.0
"""The child's imports take seconds on a busy machine; they do not count against a sample's time."""
MAX_LINE_BYTES = 1 << 20
MATH_WORKER = python_module("flotilla.services.reward.verifiers.math_worker")
TEXT_WORKER = python_module("flotilla.services.reward.verifiers.text_worker")


class ComparingVerifier:
    """Compares in children, ``config.processes`` samples at a time.

    Args:
        config: the component's section.
        command: how to start a child, whose answers are ``{"verdict": bool, "answer": str | None}`` or ``{"error":
            str}``.
        opening: what the child loads.
        needs_label: whether a sample without a label is an error.
        options: sent to the child with each sample, besides its texts.
    """

    def __init__(
        self,
        config: ComparedConfig,
        command: Sequence[str],
        opening: object = None,
        *,
        needs_label: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._config = config
        self._needs_label = needs_label
        self._options = {} if options is None else {"options": options}
        self._all = [
            CallProcess(
                command,
                opening,
                "the comparison",
                start_seconds=START_SECONDS,
                max_line_bytes=MAX_LINE_BYTES,
                on_line=unheard,
            )
            for _ in range(config.processes)
        ]
        self._idle: asyncio.LifoQueue[CallProcess] = asyncio.LifoQueue()
        for process in self._all:
            self._idle.put_nowait(process)

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right by the comparison, an error if it was not decided in time."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End all children."""
        for process in self._all:
            await process.aclose()

    async def _grade(self, sample: GradingSample) -> Grade:
        if self._needs_label and sample.label is None:
            return Grade.error(NO_LABEL)
        asked = {"response": sample.response, "label": sample.label, **self._options}
        process = await self._idle.get()
        try:
            reply = await self._compare(process, asked)
        except FlotillaError as error:
            return Grade.error(error.detail)
        finally:
            self._idle.put_nowait(process)
        if "error" in reply:
            return Grade.error(str(reply["error"]))
        answer = reply.get("answer")
        found = answer if isinstance(answer, str) else None
        return verdict(self._config, is_correct=reply["verdict"] is True, answer=found)

    async def _compare(self, process: CallProcess, asked: object) -> Mapping[str, object]:
        try:
            await process.start()
        except InvalidSpec as error:
            words = "the comparing process did not start; is flotilla[reward] installed?"
            raise GradingFailed(f"{words} {error.detail}") from error
        seconds = self._config.timeout_seconds
        try:
            found: Mapping[str, object] = await process.call(asked, seconds=seconds)
        except DeadlineExceeded:
            raise GradingFailed(f"the comparison took longer than {seconds:g} s") from None
        return found


class RegexVerifier(ComparingVerifier):
    """Right is what matches the pattern: that of the section, else the label."""

    def __init__(self, config: RegexConfig) -> None:
        options = {"pattern": config.pattern, "whole": config.whole, "ignore_case": config.ignore_case}
        super().__init__(config, TEXT_WORKER, config.kind, needs_label=config.pattern is None, options=options)


class JsonSchemaVerifier(ComparingVerifier):
    """Right is JSON that the schema allows: that of the section, else the label."""

    def __init__(self, config: JsonSchemaConfig) -> None:
        options = {"json_schema": config.json_schema}
        super().__init__(config, TEXT_WORKER, config.kind, needs_label=config.json_schema is None, options=options)


class MathVerifier(ComparingVerifier):
    """Compares by math-verify.

    Args:
        config: the component's section.
        command: how to start the child; another one only in tests.
    """

    def __init__(self, config: MathConfig, command: Sequence[str] = MATH_WORKER) -> None:
        super().__init__(config, command)
