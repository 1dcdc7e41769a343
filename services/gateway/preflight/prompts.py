"""What the model will be given: the first prompts of a dataset, rendered and counted as the rollouts do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.datasets.columns import messages_of, value_at
from services.gateway.datasets.dataset import Dataset
from services.gateway.datasets.lengths import LengthProcess, running_process
from shared.config.spec import ExperimentSpec
from shared.errors import DataError
from shared.model_hub import model_directory
from shared.prompts import PromptTemplate
from shared.schemas.task import Message

NUM_ROWS = 200
"""Of each dataset: a template that refuses a prompt mostly refuses the first one."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The first prompts of the training rows and the held-out ones.

    Attributes:
        num_prompts: looked at.
        shortest, longest: in tokens.
        limit: tokens that a prompt may have.
        num_too_long: of those looked at; what becomes of them is ``data.overlong``.
        rendered_by: the input template, the tokenizer's chat template, or neither.
        first: the first training prompt, as the model is given it.
    """

    num_prompts: int
    shortest: int
    longest: int
    limit: int
    num_too_long: int
    rendered_by: str
    first: str


def look_at_prompts(spec: ExperimentSpec, datasets: Sequence[Dataset]) -> Prompts:
    """Load the tokenizer in a child process and render the first rows of each dataset; takes seconds.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        DataError: a row has no prompt, or the template refuses it.
    """
    template = PromptTemplate.of(spec.data)
    lengths: list[int] = []
    texts: list[str] = []
    with running_process(str(model_directory(spec.model)), template) as child:
        for dataset in datasets:
            first = _messages(dataset)
            lengths += _ask(child, first)["lengths"]
            texts = texts or _ask(child, first[:1], show=True)["texts"]
        rendered_by = _named(template, has_chat_template=child.has_chat_template)
    limit = spec.max_prompt_tokens
    too_long = sum(length > limit for length in lengths)
    return Prompts(len(lengths), min(lengths), max(lengths), limit, too_long, rendered_by, texts[0])


def _messages(dataset: Dataset) -> list[tuple[Message, ...]]:
    config = dataset.config
    rows = dataset.rows[:NUM_ROWS]
    return [tuple(messages_of(value_at(row, config.prompt_column), config, number)) for number, row in enumerate(rows)]


def _ask(child: LengthProcess, prompts: Sequence[Sequence[Message]], *, show: bool = False) -> dict[str, Any]:
    answer = child.ask({"prompts": [[[m.role, m.content] for m in prompt] for prompt in prompts], "show": show})
    if "error" in answer:
        raise DataError(f"the template refuses the prompt of row {answer['index']}: {answer['error']}")
    return answer


def _named(template: PromptTemplate, *, has_chat_template: bool) -> str:
    if template.input_template is not None:
        return "data.input_template"
    if has_chat_template:
        return "the tokenizer's chat template"
    return "nothing: the tokenizer has no chat template, so a prompt's messages are joined by blank lines"
