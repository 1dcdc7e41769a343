"""Rows that hold answers which are to be graded: each becomes a group that needs no rollout.

No policy sampled the tokens, so they have no version and no log-probabilities.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from flotilla.services.gateway.datasets.columns import ABSENT, Row, value_at
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.lengths import LengthProcess, running_process
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.prompts import ASSISTANT, PromptTemplate
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, Group, Trajectory


def answers_of(values: Row, column: str, row: int) -> list[str]:
    """Read the answers of a row.

    Raises:
        DataError: there are none, or they are no texts.
    """
    found = value_at(values, column)
    given = [found] if isinstance(found, str) else found
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, str) for each in given):
        what = "missing" if found is ABSENT else "no text and no list of texts"
        raise DataError(f"row {row} has in column {column!r} (job.response_column) no answers: it is {what}", row=row)
    return list(given)


def check_written(dataset: Dataset, column: str) -> None:
    """Check that every row has as many answers as the first one.

    Raises:
        DataError: one has not.
    """
    wanted = len(answers_of(dataset.rows[0], column, 0))
    for number, values in enumerate(dataset.rows):
        given = len(answers_of(values, column, number))
        if given != wanted:
            raise DataError(
                f"row {number} has {given} answers in column {column!r} and row 0 has {wanted}: give every row as many",
                row=number,
            )


class WrittenAnswers:
    """Makes the groups of an experiment's rows. Its calls block, and are made one at a time.

    Args:
        spec: of a job that grades written answers.
        open_process: starts the process that has the tokenizer.
    """

    def __init__(self, spec: ExperimentSpec, open_process: Callable[[ExitStack], LengthProcess] | None = None) -> None:
        assert spec.written_answers is not None
        self._spec, self._column = spec, spec.written_answers
        self._open = open_process or self._open_process
        self._stack = ExitStack()
        self._process: LengthProcess | None = None

    def num_answers(self, dataset: Dataset) -> int:
        """Count the answers of each row."""
        return len(answers_of(dataset.rows[0], self._column, 0))

    def groups(self, dataset: Dataset, tasks: Sequence[Task]) -> list[Group]:
        """Make the group of each task's row.

        Raises:
            DataError: a row cannot be rendered.
            ModelError: the tokenizer cannot be loaded.
        """
        answers = [answers_of(dataset.rows[task.row], self._column, task.row) for task in tasks]
        prompts = [[[each.role, each.content] for each in task.messages] for task in tasks]
        asked = [
            ([*prompt, [ASSISTANT, answer]], len(prompt))
            for prompt, written in zip(prompts, answers, strict=True)
            for answer in written
        ]
        reply = self._running().ask({"conversations": [each for each, _ in asked], "starts": [at for _, at in asked]})
        if "error" in reply:
            task = tasks[reply["index"] // len(answers[0])]
            raise DataError(f"row {task.row} cannot be rendered: {reply['error']}", row=task.row)
        rendered = iter(reply["rendered"])
        return [
            Group(
                task,
                tuple(_trajectory(text, *next(rendered)) for text in written),
                prompt="\n\n".join(each.content for each in task.messages),
            )
            for task, written in zip(tasks, answers, strict=True)
        ]

    def close(self) -> None:
        """End the process."""
        self._process = None
        self._stack.close()

    def _running(self) -> LengthProcess:
        if self._process is None:
            self._process = self._open(self._stack)
        return self._process

    def _open_process(self, stack: ExitStack) -> LengthProcess:
        path = str(model_directory(self._spec.model))
        return stack.enter_context(running_process(path, PromptTemplate.of(self._spec.data)))


def _trajectory(text: str, token_ids: Any, mask: Any) -> Trajectory:
    return Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        log_probs=np.zeros(len(token_ids), np.float32),
        versions=((0, NO_VERSION),),
        finish_reason=FinishReason.STOP,
        text=text,
    )
