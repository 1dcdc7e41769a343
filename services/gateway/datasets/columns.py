"""From the columns of a row to the parts of a task. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from flotilla.shared.config.sections.data import DataConfig, RowsConfig
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.task import Message

Row = Mapping[str, Any]


class Absent:
    """The value of a column that a row does not have, where null is one."""


ABSENT: Final = Absent()


def value_at(row: Row, column: str) -> Any:
    """Find a column, or, with dots, a place inside of one; ABSENT if there is none.

    A column whose very name has dots comes first. A structure that was written as JSON text is read.
    """
    if column in row:
        return row[column]
    head, *inner = column.split(".")
    found = row.get(head, ABSENT)
    for name in inner:
        if isinstance(found, str):
            found = structure_of(found)
        if not isinstance(found, Mapping) or name not in found:
            return ABSENT
        found = found[name]
    return found


def structure_of(text: str) -> Any:
    """Read JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def columns_of(config: DataConfig) -> dict[str, str | None]:
    """Map what a column is to its name, for the columns that a dataset has."""
    return {"prompt": config.prompt_column, "label": config.label_column, "data_source": config.data_source_column}


def with_columns_of(row: Row, config: DataConfig, rows: RowsConfig) -> Row:
    """Rename a row's columns to those that ``data`` names, where its source names others or one data source for all."""
    taken = {*rows.columns.values(), *(columns_of(config)[what] for what in rows.columns)}
    changed = {name: value for name, value in row.items() if name not in taken}
    for what, own in rows.columns.items():
        column, value = columns_of(config)[what], value_at(row, own)
        if column is not None and value is not ABSENT:
            changed[column] = value
    if rows.data_source is not None and config.data_source_column is not None:
        changed[config.data_source_column] = rows.data_source
    return changed


def prompt_of(values: Mapping[str, Any], config: DataConfig, row: int) -> tuple[Message, ...]:
    """Make the prompt of a row of what its columns hold: see ``messages_of``.

    Raises:
        DataError: as there; or ``data.input_column`` holds what is no text, or has no text before it.
    """
    prompt = value_at(values, config.prompt_column)
    more = ABSENT if config.input_column is None else value_at(values, config.input_column)
    if more is ABSENT or more is None or more == "":
        return messages_of(prompt, config, row)
    if not isinstance(prompt, str) or not isinstance(more, str):
        raise DataError(
            f"row {row} has text in one alone of columns {config.prompt_column!r} and {config.input_column!r}, which "
            "data.input_column joins: both must hold text",
            row=row,
        )
    return messages_of(f"{prompt}\n{more}", config, row)


def messages_of(prompt: Any, config: DataConfig, row: int) -> tuple[Message, ...]:
    """Make the prompt of a row: messages; with an input template, one message that is its text.

    A list of messages may also be written as JSON text, as a CSV must.

    Raises:
        DataError: the prompt is neither text nor a list of {role, content}; or it is such a list, for which an input
            template has no place.
    """
    system = (Message("system", config.system_prompt),) if config.system_prompt is not None else ()
    chat = prompt
    if isinstance(prompt, str):
        chat = structure_of(prompt) if prompt.lstrip().startswith("[{") else None
        if not _is_chat(chat):
            return (*system, Message("user", prompt))
    if not _is_chat(chat):
        found = "missing" if prompt is ABSENT else "null" if prompt is None else type(prompt).__name__
        raise DataError(
            f"the prompt of row {row}, in column {config.prompt_column!r}, must be text or a list of {{role, content}} "
            f"messages, and is {_first_fault(prompt) or found}",
            row=row,
        )
    if config.input_template is not None:
        raise DataError(
            f"the prompt of row {row}, in column {config.prompt_column!r}, is a list of messages, and "
            "data.input_template takes text: leave it out to use the model's chat template",
            row=row,
        )
    return (*system, *(Message(each["role"], each["content"]) for each in chat))


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(each) for each in value)


def _first_fault(prompt: Any) -> str | None:
    """Describe what is no message in a list; None if every entry is one."""
    if not isinstance(prompt, list):
        return None
    number = next((number for number, each in enumerate(prompt) if not _is_message(each)), None)
    return (
        "an empty list" if number is None else f"a list whose item {number} is no message: {str(prompt[number])[:80]}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def plain(value: Any) -> Any:
    """Keep what travels in a message as it is, and write everything else, such as a date, as text."""
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def text_of(label: Any) -> str:
    """Write a label as text: text stays, numbers and structures become JSON."""
    return label if isinstance(label, str) else json.dumps(label, default=str)
