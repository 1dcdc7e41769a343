"""Comparisons that may never return, in child processes that are killed when they exceed their time.

The grade of such a sample is an error. A child serves one sample at a time; a killed one is replaced before the next
sample.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence

from flotilla.services.reward.verifiers.base import NO_LABEL, verdict
from flotilla.shared.children.processes import kill, reap
from flotilla.shared.config.sections.reward import ComparedConfig
from flotilla.shared.errors import GradingFailed
from flotilla.shared.host.start_patience import start_timeout
from flotilla.shared.schemas.grading import Grade, GradingSample

START_SECONDS = 60.0
"""The child's imports take seconds on a busy machine; they do not count against a sample's time."""
MAX_LINE_BYTES = 1 << 20


class ComparingProcess:
    """One child process, started when it is first needed."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, asked: Mapping[str, object], timeout_seconds: float) -> dict[str, object]:
        """Compare one sample.

        Args:
            asked: what the child reads, besides ``timeout_seconds``.
            timeout_seconds: time for the comparison.

        Returns:
            ``{"verdict": bool, "answer": str | None}`` or ``{"error": str}``.

        Raises:
            GradingFailed: the child could not be started, died, or took longer than ``timeout_seconds``.
        """
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        line = json.dumps({**asked, "timeout_seconds": timeout_seconds}).encode() + b"\n"
        try:
            async with asyncio.timeout(timeout_seconds):
                process.stdin.write(line)
                await process.stdin.drain()
                reply = await process.stdout.readline()
        except TimeoutError:
            await self.kill()
            raise GradingFailed(f"the comparison took longer than {timeout_seconds:g} s") from None
        except (OSError, ValueError) as error:
            await self.kill()
            raise GradingFailed(f"the comparing process failed: {error!r}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if not reply.endswith(b"\n"):
            await self.kill()
            raise GradingFailed(f"the comparing process ended with exit code {process.returncode}")
        answer: dict[str, object] = json.loads(reply)
        return answer

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
        )
        self._process = process
        assert process.stdout is not None
        try:
            async with start_timeout(START_SECONDS, process.pid):
                greeting = await process.stdout.readline()
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise GradingFailed(f"the comparing process did not start within {START_SECONDS:g} s") from None
            raise
        if greeting != b"ready\n":
            await self.kill()
            raise GradingFailed("the comparing process did not start; is flotilla[reward] installed?")
        return process

    async def kill(self) -> None:
        """End the child and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        kill(process)
        if process.stdin is not None:
            process.stdin.close()
        await reap(process)


class ComparingVerifier:
    """Compares in children, ``config.processes`` samples at a time.

    Args:
        config: the component's section.
        command: how to start a child.
        needs_label: whether a sample without a label is an error.
        options: what the child is told with each sample, besides its texts.
    """

    def __init__(
        self,
        config: ComparedConfig,
        command: Sequence[str],
        *,
        needs_label: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._config = config
        self._needs_label = needs_label
        self._options = {} if options is None else {"options": options}
        self._all = [ComparingProcess(command) for _ in range(config.processes)]
        self._idle: asyncio.LifoQueue[ComparingProcess] = asyncio.LifoQueue()
        for process in self._all:
            self._idle.put_nowait(process)

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right if the comparison says so, error if that could not be told in time."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End all children."""
        for process in self._all:
            await process.kill()

    async def _grade(self, sample: GradingSample) -> Grade:
        if self._needs_label and sample.label is None:
            return Grade.error(NO_LABEL)
        asked = {"response": sample.response, "label": sample.label, **self._options}
        process = await self._idle.get()
        try:
            reply = await process.ask(asked, self._config.timeout_seconds)
        except GradingFailed as error:
            return Grade.error(error.detail)
        finally:
            self._idle.put_nowait(process)
        if "error" in reply:
            return Grade.error(str(reply["error"]))
        answer = reply.get("answer")
        found = answer if isinstance(answer, str) else None
        return verdict(self._config, is_correct=reply["verdict"] is True, answer=found)
