"""verl's scoring of answers that were written before (``main_eval``) as a system to import from."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from flotilla.importers.datasets import FILES
from flotilla.importers.parameter import Parameter, applied, ignored, translated
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.values import text
from flotilla.importers.verl.algorithm import REWARD_ROWS
from flotilla.importers.verl.rewards import function_or_default
from flotilla.shared.config.sections.data import is_data_file

Fields = dict[str, Any]

OTHERS = ("rollout.", "model.", "actor_rollout_ref.", "trainer.")
"""Sections of verl's other programs that read ``data.path``."""


def is_file_of_answers(names: Collection[str]) -> bool:
    """Whether a YAML file with these parameters scores answers that were written before."""
    return "data.path" in names and not any(name.startswith(OTHERS) for name in names)


ROWS: tuple[Parameter, ...] = (
    *ignored("the program is the job: job.kind", "python -m"),
    translated("data.path", "evaluation.path", text, "file with the rows and the answers to them",
               example="other.parquet", default=None, aliases=("evaluation.data.path",)),
    applied("data.prompt_key", "data.prompt_column", text, "column with the chat messages", example="messages",
            default="prompt", aliases=("evaluation.data.prompt_key",)),
    applied("data.response_key", "job.response_column", text, "column with the answers: a text, or a list of texts",
            example="answers", default="responses", aliases=("evaluation.data.response_key",)),
    applied("data.data_source_key", "data.data_source_column", text, "column that says which dataset a row is from",
            example="origin", default="data_source", aliases=("evaluation.data.data_source_key",)),
    translated("data.reward_model_key", "data.label_column", text, "column in which ground_truth is the label",
               example="truth", default="reward_model", translate=lambda value: f"{value}.ground_truth",
               aliases=("evaluation.data.reward_model_key",)),
    *(replace(row, aliases=(*row.aliases, f"evaluation.{row.name}"))
      for row in REWARD_ROWS if row.name.startswith("custom_reward_function.")),
    *ignored("there is no Ray here", "ray_init", "ray_kwargs", is_tree=True),
)  # fmt: skip


def answers(source: Source) -> Fields:
    """Make the rows with their answers, and say that the tokenizer is not named."""
    path = source.value("data.path")
    if path is None:
        source.lack("evaluation.path: give data.path")
    elif not is_data_file(path):
        source.refuse("data.path", f"must be {FILES}")
    source.lack("model.path: verl names no model here, and its tokenizer counts the answers' tokens: --set model.path=")
    rows = {} if path is None else {"evaluation.path": path}
    return {"name": "evaluation", "job.kind": "evaluation", "model": {}, **rows}


VERL_EVAL: System = make_system("verl main_eval", (ROWS,), rules=(answers, function_or_default))
