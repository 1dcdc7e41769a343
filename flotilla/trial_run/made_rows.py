"""Rows of a spec's own schema, made up: its columns, messages or text, images, labels that its graders can read."""

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.job import FinishedJob, KtoConfig, SftConfig
from flotilla.shared.config.sections.reward import (
    ChoiceConfig,
    CodeConfig,
    Component,
    FormatConfig,
    IfevalConfig,
    JsonSchemaConfig,
    VerlDefaultConfig,
)
from flotilla.shared.config.sections.verl_sources import VerlScorer, scorer_of
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.trial_run.edits import Document, Section

NUM_ROWS: Final = 8
RIGHT: Final = ("1", "2")
"""Labels; about half of the answers that a trial's model gives are right."""
PROGRAMS: Final = tuple(f"\n```python\nprint({each})\n```\n" for each in RIGHT)
LETTERS: Final = ("A", "B")
DATA_SOURCES: Final = (
    ("gsm8k", "openai/gsm8k"), ("geo", "hiyouga/geometry3k"), ("aime", "math_dapo"), ("dapo", "math_dapo"),
    ("search", "searchR1_nq"), ("hotpot", "searchR1_hotpotqa"), ("code", "codecontests"),
    ("math", "DigitalLearningGmbH/MATH-lighteval"),
)  # fmt: skip
"""Of a file whose name has the word; of others the first."""
SIDE: Final = 16
"""Pixels of an image's side."""
ROLES: Final = ("messages", "conversation", "conversations")
MARK: Final = "<image>"
SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"


def data_sources_of(place: str, components: Sequence[Component]) -> list[str]:
    """Choose the data sources of made rows: those that components are for, else one that the file's name tells."""
    if components and all(each.data_sources for each in components):
        return list(dict.fromkeys(source for each in components for source in each.data_sources or ()))
    lower = place.lower()
    return [next((source for word, source in DATA_SOURCES if word in lower), DATA_SOURCES[0][1])]


def label_of(number: int, data_source: str, components: Sequence[Component]) -> Any:
    """Make a label that the component for a data source reads."""
    digit = RIGHT[number % len(RIGHT)]
    mine = [each for each in components if each.data_sources is None or data_source in each.data_sources]
    for each in mine:
        if isinstance(each, ChoiceConfig):
            return LETTERS[number % len(LETTERS)]
        if isinstance(each, IfevalConfig):
            return json.dumps({"func_name": "validate_lowercase"})
        if isinstance(each, JsonSchemaConfig) and each.json_schema is None:
            return json.dumps({"type": "integer"})
        if isinstance(each, CodeConfig):
            return json.dumps({"inputs": [""], "outputs": [f"{digit}\n"]})
        if isinstance(each, VerlDefaultConfig) and (scorer := scorer_of(data_source)) is not None:
            if scorer is VerlScorer.SEARCH:
                return {"target": [digit]}
            if scorer is VerlScorer.CODE:
                return json.dumps({"inputs": [""], "outputs": [f"{digit}\n"]})
    return digit


def answers_of(spec: ExperimentSpec) -> list[str]:
    """List the answers that rows expect, in the forms that graders look for."""
    found = [form.format(each) for each in RIGHT for form in FORMS]
    for each in spec.reward.components:
        if isinstance(each, ChoiceConfig):
            found += [f"\n\\boxed{{{letter}}}\n" for letter in LETTERS]
        if isinstance(each, FormatConfig):
            found += ["".join(f"<{tag}>{number}</{tag}>" for tag in each.tags) for number in RIGHT]
        if isinstance(each, CodeConfig) or (isinstance(each, VerlDefaultConfig) and each.runs_code):
            found += PROGRAMS
    return found


FORMS: Final = ("\n#### {}\n", "\nAnswer: {}\n", "\n\\boxed{{{}}}\n", "<answer>{}</answer>")


def made_rows(spec: ExperimentSpec, sources: Sequence[str], *, num_rows: int = NUM_ROWS) -> list[Document]:
    """Make rows of the columns that ``data`` and ``job`` name.

    Args:
        sources: data sources, which rows have in turn.
        num_rows: how many.
    """
    return [_row(spec, number, sources[number % len(sources)]) for number in range(num_rows)]


def _row(spec: ExperimentSpec, number: int, data_source: str) -> Document:
    data, job = spec.data, spec.finished_job
    row: Document = {}
    if job is not None:
        _finish(row, data, job, number)
    else:
        _put(row, data.prompt_column, _prompt(data, number))
    if data.input_column is not None:
        _put(row, data.input_column, f"There are {number + 1} of them.")
    if data.label_column is not None and job is None:
        _put(row, data.label_column, label_of(number, data_source, spec.reward.components))
    if data.data_source_column is not None:
        _put(row, data.data_source_column, data_source)
    if data.images is not None:
        _put(row, data.images.column, [image(number)])
    weights = spec.algorithm.sequence_weights
    if weights is not None and weights.difficulty is not None:
        _put(row, weights.difficulty, number / NUM_ROWS)
    if data.format == "verl":
        row.setdefault("ability", "math")
        row.setdefault("extra_info", {"split": "train", "index": number})
    response = spec.written_answers
    if response is not None:
        _put(row, response, [FORMS[number % len(FORMS)].format(each) for each in RIGHT])
    return row


def _question(data: DataConfig, number: int) -> str:
    mark = f"{MARK}\n" if data.images is not None else ""
    return f"{mark}Ana has {number + 1} pens and gives one away. Is 1 or 2 the answer?"


def _prompt(data: DataConfig, number: int) -> Any:
    text = _question(data, number)
    takes_text = data.input_template is not None or data.input_column is not None
    is_chat = data.format == "verl" or data.prompt_column.rpartition(".")[2] in ROLES
    return [{"role": "user", "content": text}] if is_chat and not takes_text else text


def _finish(row: Document, data: DataConfig, job: FinishedJob, number: int) -> None:
    """Put finished answers into a row."""
    question, answers = _question(data, number), [f"It is {each}." for each in RIGHT]
    if isinstance(job, SftConfig | KtoConfig):
        if isinstance(job, KtoConfig):
            _put(row, job.label_column, number % 2 == 0)
        if job.response_column is None:
            _put(row, data.prompt_column, _conversation(question, answers[0]))
            return
        _put(row, data.prompt_column, question)
        _put(row, job.response_column, answers[0])
        return
    is_whole = job.chosen_column == data.prompt_column
    if not is_whole:
        _put(row, data.prompt_column, question)
    for column, answer in zip((job.chosen_column, job.rejected_column), answers, strict=True):
        _put(row, column, _conversation(question, answer) if is_whole else answer)


def _conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _put(row: Document, column: str, value: Any) -> None:
    """Set a column, or a place inside of one."""
    *above, last = column.split(".")
    for name in above:
        below = row.setdefault(name, {})
        if not isinstance(below, dict):
            return
        row = below
    row[last] = value


def image(number: int) -> str:
    """Draw a square of one colour as a ``data:`` URI (PNG)."""
    colour = bytes(((number * 53) % 256, (number * 101) % 256, (number * 197) % 256))
    lines = (b"\0" + colour * SIDE) * SIDE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    whole = SIGNATURE + b"".join(_chunk(name, body) for name, body in chunks)
    return f"data:image/png;base64,{base64.b64encode(whole).decode()}"


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def as_lines(rows: Sequence[Section]) -> str:
    """Write rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
