"""Rows that hold finished answers: demonstrations, answers with a label, and pairs of which one answer is preferred.

Each becomes a group that needs no rollout. No policy sampled its tokens, so they have no version and no
log-probabilities; a demonstration, a desirable and a preferred answer have the reward 1, an undesirable one and the
other answer of a pair 0.

Rows may also hold answers that are to be graded, which become groups in the same way.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flotilla.services.gateway.datasets.columns import ABSENT, Row, messages_of, prompt_of, structure_of, value_at
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.lengths import LengthProcess, running_process
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.job import FinishedJob, KtoConfig, SftConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.prompts import ASSISTANT, PromptTemplate
from flotilla.shared.schemas.task import Message, Task, sample_seed
from flotilla.shared.schemas.trajectory import NO_VERSION, FinishReason, GradeStatus, Group, Trajectory

TOO_LONG: Final = "too_long"
REWARDS: Final = (1.0, 0.0)
"""Of the preferred answer and of the other one; of a desirable answer and of an undesirable one."""
LABELS: Final[Mapping[Any, bool]] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
"""What a label's column may hold, where text counts without its capitals; 1 and 0 equal true and false."""
BALANCED: Final = (1.0, 4 / 3)
"""Desirable weight times number over undesirable weight times number, as Ethayarajh et al. (KTO, 2024) advise."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and an answer to it.

    Attributes:
        messages: all of it.
        start: the assistant's turns from this message on are learned.
    """

    messages: tuple[Message, ...]
    start: int


def conversations_of(values: Mapping[str, Any], job: FinishedJob, config: DataConfig, row: int) -> list[Conversation]:
    """Read the answers of a row: one, or the preferred answer and the other one.

    Raises:
        DataError: a column is missing, is neither text nor messages, or does not end with the assistant.
    """
    if isinstance(job, SftConfig | KtoConfig):
        columns: tuple[str | None, ...] = (job.response_column,)
        is_all = job.train_on == "all" if isinstance(job, SftConfig) else job.response_column is not None
    else:
        is_whole = job.chosen_column == config.prompt_column
        columns, is_all = (job.chosen_column, job.rejected_column), False
        if is_whole:
            found = [_chat(values, column, config, row) for column in columns if column is not None]
            return [Conversation(each, _last(each)) for each in found]
    prompt = prompt_of(values, config, row)
    if columns == (None,):
        _check_ends(prompt, config.prompt_column, row)
        return [Conversation(prompt, 0 if is_all else _last(prompt))]
    made = []
    for column in columns:
        answer = value_at(values, column or "")
        turns = (Message(ASSISTANT, answer),) if isinstance(answer, str) and not _is_list(answer) else None
        messages = (*prompt, *(turns or _chat(values, column or "", _without_system(config), row)))
        made.append(Conversation(messages, len(prompt) if is_all or len(columns) > 1 else _last(messages)))
    return made


def _is_list(text: str) -> bool:
    return text.lstrip().startswith("[{") and isinstance(structure_of(text), list)


def _without_system(config: DataConfig) -> DataConfig:
    return config.model_copy(update={"system_prompt": None, "input_template": None})


def _chat(values: Mapping[str, Any], column: str, config: DataConfig, row: int) -> tuple[Message, ...]:
    found = value_at(values, column)
    if found is ABSENT or (isinstance(found, str) and not _is_list(found)):
        what = "missing" if found is ABSENT else "text, where the prompt's column holds the conversation"
        raise DataError(f"row {row} has in column {column!r} no list of messages: it is {what}", row=row)
    messages = messages_of(found, config.model_copy(update={"prompt_column": column}), row)
    _check_ends(messages, column, row)
    return messages


def _check_ends(messages: Sequence[Message], column: str, row: int) -> None:
    if messages[-1].role != ASSISTANT:
        raise DataError(
            f"the conversation of row {row}, in column {column!r}, ends with a message of {messages[-1].role!r}, not "
            "of the assistant: name the answer's column in job, or mend the row",
            row=row,
        )


def _last(messages: Sequence[Message]) -> int:
    return max(number for number, each in enumerate(messages) if each.role == ASSISTANT)


def is_desirable(values: Mapping[str, Any], job: KtoConfig, row: int) -> bool:
    """Read the label of a row.

    Raises:
        DataError: it has none, or one that is neither true nor false.
    """
    found = value_at(values, job.label_column)
    known = found.strip().lower() if isinstance(found, str) else found
    if not isinstance(known, str | bool | int | float) or known not in LABELS:
        what = "no column" if found is ABSENT else f"{found!r} in column"
        raise DataError(f"row {row} has {what} {job.label_column!r}: a label is true or false, or 1 or 0", row=row)
    return LABELS[known]


def balance_of(dataset: Dataset, job: KtoConfig) -> str:
    """Return how many rows have which label, and which weights would balance them, where these do not."""
    desirable = sum(is_desirable(values, job, number) for number, values in enumerate(dataset.rows))
    undesirable = len(dataset.rows) - desirable
    said = f"data: {desirable} rows are desirable, {undesirable} undesirable"
    if not desirable or not undesirable:
        return f"{said}: answers of one label alone only move all likelihoods one way"
    ratio = job.desirable_weight * desirable / (job.undesirable_weight * undesirable)
    if BALANCED[0] <= ratio <= BALANCED[1]:
        return said
    if ratio > BALANCED[1]:
        name = "undesirable"
        least, most = (job.undesirable_weight * ratio / each for each in reversed(BALANCED))
    else:
        name = "desirable"
        least, most = (job.desirable_weight * each / ratio for each in BALANCED)
    return (
        f"{said}: the first weigh {ratio:.3g} times as much as the others, where 1 to 4/3 is advised: set "
        f"job.{name}_weight to {least:.3g} to {most:.3g}"
    )


def check_rows(dataset: Dataset, job: FinishedJob, field: str) -> None:
    """Check that every row has its answers.

    Raises:
        DataError: one has not.
    """
    for number, values in enumerate(dataset.rows):
        try:
            conversations_of(values, job, dataset.config, number)
            if isinstance(job, KtoConfig):
                is_desirable(values, job, number)
        except DataError as error:
            raise DataError(f"{field}: {error.detail}", row=number) from error


class FinishedGroups:
    """Makes the groups of an experiment's rows. Its calls block, and take turns.

    Args:
        spec: of a job on finished answers.
        open_process: starts the process that has the tokenizer.
    """

    def __init__(self, spec: ExperimentSpec, open_process: Callable[[ExitStack], LengthProcess] | None = None) -> None:
        job = spec.finished_job
        assert job is not None
        self._spec, self._job = spec, job
        self._open = open_process or self._open_process
        self._turns = threading.Lock()
        self._stack: ExitStack | None = None
        self._process: LengthProcess | None = None
        self._unfit: dict[int, int] = {}

    def groups(
        self, dataset: Dataset, ids: Sequence[int], *, rows: Sequence[int] | None = None, issued_at: float = 0.0
    ) -> list[Group]:
        """Make the groups of these ids; ``rows`` overrides the dataset's order (held-out rows).

        Raises:
            DataError: a row cannot be read or rendered, or no row of the dataset is short enough.
            ModelError: the tokenizer cannot be loaded.
        """
        chosen = [dataset.row_of(group_id) for group_id in ids] if rows is None else rows
        read = [conversations_of(dataset.rows[row], self._job, dataset.config, row) for row in chosen]
        rendered = iter(self._rendered([each for group in read for each in group], chosen, len(read[0]) if read else 1))
        made = []
        for group_id, row, conversations in zip(ids, chosen, read, strict=True):
            found = [next(rendered) for _ in conversations]
            is_fit = all(self._fits(mask) for _, mask in found)
            unfit = self._unfit[id(dataset)] = 0 if is_fit else self._unfit.get(id(dataset), 0) + 1
            if unfit >= len(dataset.rows):
                raise DataError(
                    f"none of {len(dataset.rows)} rows has at most {self._job.max_tokens} tokens: raise "
                    "job.max_tokens, or set job.overlong to truncate"
                )
            task = Task(
                group_id=group_id,
                row=row,
                messages=conversations[0].messages[: conversations[0].start],
                group_size=len(conversations),
                seed=sample_seed(dataset.seed, group_id),
                issued_at=issued_at,
            )
            rewards = REWARDS
            if isinstance(self._job, KtoConfig):
                rewards = REWARDS if is_desirable(dataset.rows[row], self._job, row) else REWARDS[::-1]
            answers = zip(conversations, found, rewards, strict=False)
            made.append(Group(task, tuple(self._answer(*each, is_fit=is_fit) for each in answers)))
        return made

    def close(self) -> None:
        """End the process; it is started again when it is needed."""
        stack, self._stack, self._process = self._stack, None, None
        if stack is not None:
            stack.close()

    def _fits(self, mask: Sequence[int]) -> bool:
        most = self._job.max_tokens
        if most is None or len(mask) <= most:
            return True
        return self._job.overlong == "truncate" and (self._learns_every_token or any(mask[:most]))

    @property
    def _learns_every_token(self) -> bool:
        return isinstance(self._job, SftConfig) and self._job.train_on == "every_token"

    def _answer(
        self, conversation: Conversation, rendered: tuple[list[int], list[int]], reward: float, *, is_fit: bool
    ) -> Trajectory:
        most = self._job.max_tokens
        token_ids, mask = (np.array(each[:most]) for each in rendered)
        if self._learns_every_token:
            mask = np.arange(len(token_ids)) > 0  # nothing stands before the first, which it could follow from
        made = Trajectory(
            token_ids=token_ids.astype(np.int32),
            loss_mask=mask.astype(np.uint8),
            log_probs=np.zeros(len(token_ids), dtype=np.float32),
            versions=((0, NO_VERSION),),
            finish_reason=FinishReason.STOP if len(rendered[0]) == len(token_ids) else FinishReason.LENGTH,
            text=conversation.messages[-1].content,
        )
        if is_fit:
            return made.graded(GradeStatus.SCORED, reward)
        return made.graded(GradeStatus.ABSTAINED, None, reason=TOO_LONG)

    def _rendered(
        self, conversations: Sequence[Conversation], rows: Sequence[int], per_row: int
    ) -> list[tuple[list[int], list[int]]]:
        if not conversations:
            return []
        request = {
            "conversations": [[[m.role, m.content] for m in each.messages] for each in conversations],
            "starts": [each.start for each in conversations],
        }
        with self._turns:
            try:
                answer = self._running().ask(request)
            except DataError:
                # It was killed, perhaps for memory: the next one may have more.
                self.close()
                answer = self._running().ask(request)
        if "error" in answer:
            row = rows[answer["index"] // per_row]
            raise DataError(f"row {row} cannot be rendered: {answer['error']}", row=row)
        return [(ids, mask) for ids, mask in answer["rendered"]]

    def _running(self) -> LengthProcess:
        if self._process is None:
            stack = ExitStack()
            self._process, self._stack = self._open(stack), stack
        return self._process

    def _open_process(self, stack: ExitStack) -> LengthProcess:
        path = str(model_directory(self._spec.model))
        return stack.enter_context(running_process(path, PromptTemplate.of(self._spec.data)))


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
