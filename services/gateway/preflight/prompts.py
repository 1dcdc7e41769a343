"""What the model will be given: the first prompts of a dataset, rendered and counted as the rollouts do."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.services.gateway.datasets.columns import prompt_of
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.illustrated import images_of
from flotilla.services.gateway.datasets.lengths import BATCH, IMAGE_BATCH, LengthProcess, asked, running_process
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message

NUM_ROWS = 200
"""Of each dataset: a template that refuses a prompt mostly refuses the first one."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The first prompts of the training rows and the held-out ones.

    Attributes:
        num_prompts: examined.
        shortest, longest: in tokens.
        limit: tokens that a prompt may have.
        num_too_long: of those looked at; what becomes of them is ``data.overlong``.
        rendered_by: the input template, the tokenizer's chat template, or neither.
        first: the first training prompt, as the model is given it; with the first observation of an environment.
        own_context: tokens that the model itself can hold; None where its config.json does not say.
    """

    num_prompts: int
    shortest: int
    longest: int
    limit: int
    num_too_long: int
    rendered_by: str
    first: str
    own_context: int | None = None


def look_at_prompts(
    spec: ExperimentSpec, datasets: Sequence[Dataset], begun: Sequence[tuple[Message, ...]] = ()
) -> Prompts:
    """Load the tokenizer in a child process and render the first rows of each dataset; takes seconds.

    Args:
        begun: first prompts of episodes, with what an environment showed; the first of them is shown.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        DataError: a row has no prompt, or the template refuses it.
    """
    template = PromptTemplate.of(spec.data)
    lengths: list[int] = []
    texts: list[str] = []
    with running_process(str(model_directory(spec.model)), template, spec.data.images) as child:
        if begun:
            answer = _ask(child, begun, show=True)
            lengths, texts = list(answer["lengths"]), list(answer["texts"])
        for dataset in datasets:
            first = _messages(dataset)
            images = [images_of(row, dataset.config) for row in dataset.rows[: len(first)]]
            size = BATCH if spec.data.images is None else IMAGE_BATCH
            for start in range(0, len(first), size):
                part = slice(start, start + size)
                lengths += _ask(child, first[part], images[part])["lengths"]
            texts = texts or _ask(child, first[:1], images[:1], show=True)["texts"]
        rendered_by = _named(template, has_chat_template=child.has_chat_template)
    limit = spec.max_prompt_tokens
    too_long = sum(length > limit for length in lengths)
    own = _own_context(spec)
    return Prompts(len(lengths), min(lengths), max(lengths), limit, too_long, rendered_by, texts[0], own)


def why_no_room(spec: ExperimentSpec, prompts: Prompts) -> str | None:
    """Return why the engine's context cannot hold the longest prompt and its answer, naming keys and cause, if so."""
    if not spec.samples_answers:
        return None
    key, sampled = "rollout.sampling.max_new_tokens", spec.rollout.sampling.max_new_tokens
    held_out = (spec.evaluation and spec.evaluation.max_new_tokens) or 0
    if held_out > sampled:
        key, sampled = "evaluation.max_new_tokens", held_out
    context = spec.rollout.engine.context_tokens
    cause = f"the {context} of rollout.engine.context_tokens"
    if prompts.own_context is not None and prompts.own_context < context:
        context = prompts.own_context
        cause = f"the {context} that the model can hold (max_position_embeddings in its config.json; {cause} are cut)"
    if sampled >= context:
        return f"{key} {sampled} leaves no room for a prompt in {cause}: lower {key}"
    # What is longer is left out, or cut, before it reaches the engine.
    is_error = spec.data.overlong.kind == "error"
    longest = prompts.longest if is_error else min(prompts.longest, prompts.limit)
    if longest + sampled <= context:
        return None
    return (
        f"a prompt of {longest} tokens and {sampled} new ones ({key}) make {longest + sampled}, more than {cause}: "
        f"lower {key}, shorten the prompts (data.max_prompt_tokens with data.overlong), or raise "
        "rollout.engine.context_tokens where the model can hold more"
    )


def _own_context(spec: ExperimentSpec) -> int | None:
    try:
        config = json.loads((model_directory(spec.model) / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        found = text.get("max_position_embeddings") or text.get("n_positions")
    except (OSError, ValueError, AttributeError):
        return None  # said where the model is checked
    return found if isinstance(found, int) else None


def _messages(dataset: Dataset) -> list[tuple[Message, ...]]:
    config = dataset.config
    rows = dataset.rows[:NUM_ROWS]
    return [tuple(prompt_of(row, config, number)) for number, row in enumerate(rows)]


def _ask(
    child: LengthProcess,
    prompts: Sequence[Sequence[Message]],
    images: Sequence[Sequence[bytes]] = (),
    *,
    show: bool = False,
) -> dict[str, Any]:
    answer = child.ask(asked(prompts, images) | {"show": show})
    if "error" in answer:
        raise DataError(f"the template refuses the prompt of row {answer['index']}: {answer['error']}")
    return answer


def _named(template: PromptTemplate, *, has_chat_template: bool) -> str:
    if template.input_template is not None:
        return "data.input_template"
    if has_chat_template:
        return "the tokenizer's chat template"
    return "nothing: the tokenizer has no chat template, so a prompt's messages are joined by blank lines"
