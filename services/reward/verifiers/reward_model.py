"""A reward model, or a judge, in a process of its own, which has torch and knows no secret of the service.

Samples of all groups that wait go to it in batches. A process that dies, or takes too long, is started again, and gets
its batch again: until then samples wait. Only a batch on which it died several times is abandoned, as errors, never as
zeros.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.reward.verdicts import question_of
from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.restarts import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Restarts
from flotilla.shared.children.spawning import child_environment
from flotilla.shared.config.sections.judge import JudgeModelConfig, RewardModelConfig
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, GradingFailed, InvalidSpec, Unavailable, WorkerDied
from flotilla.shared.schemas.grading import Grade, GradingSample

log = logging.getLogger(__name__)

PROCESS = "flotilla.services.reward.scoring"
START_SECONDS = 600.0
"""Large weights take long to read."""
MAX_LINE_BYTES = 256 * 1024 * 1024
CLOSED = "the reward model was closed"
DEATHS_OF_A_BATCH = 4
START_DEATHS = sys.maxsize
"""A model that was loaded once can be loaded again, when what is in the way has gone: there is no last attempt."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    text: Mapping[str, object]
    grade: asyncio.Future[Grade]


class RewardModelVerifier:
    """Grades by a reward model.

    Args:
        config: the component's section.
        directory: of the model's files.
        command: how to start the process; another one only in tests.
        first_pause_seconds: before a process that died is started again; it grows with every death.
    """

    def __init__(
        self,
        config: RewardModelConfig | JudgeModelConfig,
        directory: Path,
        *,
        command: Sequence[str] = (),
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._config = config
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._process = CallProcess(
            command or python_module(PROCESS),
            {"config": config.model_dump(mode="json"), "directory": str(directory)},
            f"reward model {config.path}",
            environment=child_environment(OMP_NUM_THREADS=str(config.threads)),
            start_seconds=START_SECONDS,
            max_line_bytes=MAX_LINE_BYTES,
        )
        self._scoring: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._deaths = Restarts(
            START_DEATHS, first_pause_seconds=first_pause_seconds, longest_pause_seconds=LONGEST_PAUSE_SECONDS
        )

    @property
    def pid(self) -> int | None:
        """Process id of the model's process; None while there is none."""
        child = self._process.child
        return None if child is None else child.process.pid

    async def start(self) -> None:
        """Start the process and let it load the model.

        Raises:
            InvalidSpec: the model cannot be loaded, or the process ended by itself.
            Unavailable: the process was killed or took too long, or something else is in the way that passes; or this
                was closed.
        """
        async with self._starting:
            if self._is_closed:
                raise Unavailable(CLOSED)
            if self._scoring is None or self._scoring.done():
                await self._load()
                self._scoring = asyncio.create_task(self._score_batches(), name="reward model")

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by the model's score of its conversation."""
        try:
            await self.start()
        except FlotillaError as error:
            return [Grade.error(error.detail)] * len(samples)
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(text_of(sample, self._config), loop.create_future()) for sample in samples]
        self._waiting.extend(waiting)
        self._arrived.set()
        return list(await asyncio.gather(*(each.grade for each in waiting)))

    async def aclose(self) -> None:
        """End the process, for good; what waits is an error."""
        self._is_closed = True
        await self._end()
        async with self._starting:  # its starter has seen that
            await self._end()

    async def _end(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.gather(self._scoring, return_exceptions=True)
        await self._process.aclose()
        self._settle_all([], CLOSED)

    async def _score_batches(self) -> None:
        batch: list[_Waiting] = []
        reason = CLOSED
        try:
            while True:
                self._arrived.clear()
                batch = self._next_batch()
                if not batch:
                    await self._arrived.wait()
                    continue
                grades = await self._graded([each.text for each in batch])
                for each, grade in zip(batch, grades, strict=True):
                    _settle(each, grade)
        except Exception as error:
            log.exception("the reward model's batches ended")
            reason = f"the reward model failed: {error!r}"
        finally:
            self._settle_all(batch, reason)

    def _settle_all(self, batch: Sequence[_Waiting], reason: str) -> None:
        for each in (*batch, *self._waiting):
            _settle(each, Grade.error(reason))
        self._waiting.clear()

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._config.batch_samples:
            each = self._waiting.popleft()
            if not each.grade.done():  # the caller may have gone
                batch.append(each)
        return batch

    async def _graded(self, texts: Sequence[Mapping[str, object]]) -> list[Grade]:
        deaths = 0
        while True:
            has_batch = False
            try:
                await self._load()
                has_batch = True
                found = await self._ask(texts)
            except (GradingFailed, InvalidSpec, Unavailable) as error:
                await self._process.aclose()
                deaths += has_batch
                if deaths == DEATHS_OF_A_BATCH:
                    detail = f"the reward model failed {deaths} times on this batch, at last: {error.detail}"
                    return [Grade.error(detail)] * len(texts)
                pause = self._deaths.died() or 0.0
                log.warning("the reward model is started again", extra={"error": error.detail, "pause_seconds": pause})
                await asyncio.sleep(pause)
            else:
                self._deaths.forget()
                return found

    async def _ask(self, texts: Sequence[Mapping[str, object]]) -> list[Grade]:
        """Let the process score a batch.

        Raises:
            GradingFailed: it ended, took too long or gave no scores.
        """
        try:
            answer = await self._process.call(list(texts), seconds=self._config.timeout_seconds)
        except WorkerDied as error:
            raise GradingFailed(f"the reward model's process {self._process.cause}") from error
        except FlotillaError as error:
            raise GradingFailed(error.detail) from error
        try:
            assert isinstance(answer, list)
            return [_grade(*each) for _, each in zip(texts, answer, strict=True)]
        except (AssertionError, TypeError, ValueError) as error:
            raise GradingFailed(f"the reward model's process gave no scores: {error}") from error

    async def _load(self) -> None:
        try:
            await self._process.start()
        except (WorkerDied, DeadlineExceeded) as error:
            # It was killed, perhaps for memory, or is slow on a busy machine.
            raise Unavailable(error.detail) from error


def text_of(sample: GradingSample, config: RewardModelConfig | JudgeModelConfig) -> dict[str, object]:
    """Make what the process reads of a sample: its conversation, prompt and response, or the question about it."""
    if isinstance(config, JudgeModelConfig):
        return {"question": question_of(sample, config)}
    if config.reads == "text" or not sample.messages:
        return {"messages": [], "prompt": sample.prompt, "response": sample.response}
    messages = [{"role": each.role, "content": each.content} for each in sample.messages]
    for turn in sample.turns[:-1]:
        messages += [*_shown(turn.observation), {"role": "assistant", "content": turn.response}]
    messages += _shown(sample.turns[-1].observation) if sample.turns else []
    return {"messages": [*messages, {"role": "assistant", "content": sample.response}]}


def _shown(observation: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": observation}] if observation else []


def _settle(waiting: _Waiting, grade: Grade) -> None:
    if not waiting.grade.done():
        waiting.grade.set_result(grade)


def _grade(score: float | None, num_tokens: int, reason: str | None) -> Grade:
    if score is None:
        return Grade.error(reason or "the reward model gave no score")
    return Grade.scored(score, metrics={"tokens": float(num_tokens)})
