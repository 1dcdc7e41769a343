"""Models that grade: a sequence classifier with one output, and a causal language model whose replies are read."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from flotilla.services.reward.verdicts import no_verdict, reward_of
from flotilla.shared.config.sections.judge import JudgeModelConfig, RewardModelConfig, ScoreNormalisation
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import check_directory
from flotilla.shared.models.prompts import ASSISTANT, PromptTemplate, render
from flotilla.shared.net.absence import absent_or
from flotilla.shared.schemas.task import Message

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD = "score"
"""What transformers calls the head of its decoders' classifiers."""
BREAK = "\u200b"
"""A space of no width: a mark with one in it is text."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one text: a score, or why there is none."""

    score: float | None
    num_tokens: int = 0
    reason: str | None = None


class Scorer:
    """Scores conversations by the model's head at the last token.

    Args:
        config: the component's section.
        directory: of the model's files.

    Raises:
        ModelError: the model cannot be loaded, has not one output, or lacks what the section asks of it.
    """

    def __init__(self, config: RewardModelConfig, directory: Path) -> None:
        check_directory(directory)
        self._config = config
        self._device = usable_device(config.device)
        self._tokenizer = load_tokenizer(directory)
        if config.template is not None:
            self._tokenizer.chat_template = config.template
        self._marks = marks_of(self._tokenizer, specials_only=True)  # reasoning marks its thoughts by others
        self._model = _load(directory, DTYPES[config.dtype]).to(self._device).eval()
        self._mean, self._std = _normalisation(config.normalise, directory)

    def score(self, texts: Sequence[Mapping[str, Any]]) -> list[Scored]:
        """Score each text.

        Args:
            texts: each with ``messages``, the last one the assistant's, or with ``prompt`` and ``response``.
        """
        rows = [self._tokens(each) for each in texts]
        found = [row if isinstance(row, Scored) else None for row in rows]
        fitting = [number for number, row in enumerate(rows) if not isinstance(row, Scored)]
        lengths = [len(row) if isinstance(row, list) else 0 for row in rows]
        for numbers in batches(fitting, lengths, self._config.batch_tokens):
            chosen = [row for number in numbers if isinstance(row := rows[number], list)]
            for number, value, row in zip(numbers, self._forward(chosen), chosen, strict=True):
                found[number] = self._scored(value, len(row))
        return [each for each in found if each is not None]

    def _scored(self, value: float, num_tokens: int) -> Scored:
        if not math.isfinite(value):
            return Scored(None, num_tokens, "the reward model's score is not a number")
        return Scored((value - self._mean) / self._std, num_tokens)

    def _tokens(self, text: Mapping[str, Any]) -> list[int] | Scored:
        try:
            token_ids = self._rendered(text)
        except Exception as error:  # a chat template raises what it likes
            return Scored(None, 0, f"the reward model's template refuses the conversation: {first_line(error)}")
        limit = self._config.max_tokens
        if len(token_ids) > limit and self._config.overlong == "error":
            return Scored(None, len(token_ids), f"{len(token_ids)} tokens are more than max_tokens, which is {limit}")
        return token_ids[-limit:] if token_ids else Scored(None, 0, "there is not one token to score")

    def _rendered(self, text: Mapping[str, Any]) -> list[int]:
        tokenizer, end = self._tokenizer, self._tokenizer.eos_token_id
        messages = [
            Message(role=each["role"], content=without_marks(each["content"], self._marks)) for each in text["messages"]
        ]
        if messages and tokenizer.chat_template:
            try:
                # What a job of kind `reward_model` was trained on: up to the end of the assistant's turn.
                rendered = render(tokenizer, PromptTemplate(), messages, len(messages) - 1)
            except ValueError:
                chat = [{"role": each.role, "content": each.content} for each in messages]
                whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
                ids = list(tokenizer(whole, add_special_tokens=False)["input_ids"])
            else:
                last = max(number for number, is_learned in enumerate(rendered.loss_mask) if is_learned)
                ids = list(rendered.token_ids[: last + 1])
            return ids if end is None or (ids and ids[-1] in tokenizer.all_special_ids) else [*ids, end]
        if messages:
            ids = list(PromptTemplate().token_ids(tokenizer, messages[:-1]))
        else:
            ids = list(tokenizer(text["prompt"], add_special_tokens=False)["input_ids"])
        answer = messages[-1].content if messages else without_marks(text["response"], self._marks)
        assert not messages or messages[-1].role == ASSISTANT
        return [*ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], *([] if end is None else [end])]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        last = mask.sum(1) - 1
        scores = self._scores(ids.to(self._device), mask.to(self._device), last.to(self._device))
        return [float(each) for each in scores.float().cpu()]

    def _scores(self, ids: Tensor, mask: Tensor, last: Tensor) -> Tensor:
        """Compute one score per row [B]: by a decoder's head at the last token, else as the classifier does itself.

        A decoder's classifier looks for the last token that is no padding token, which misses an end that is one.
        """
        head = getattr(self._model, HEAD, None)
        if not isinstance(head, nn.Module):
            found: Tensor = self._model(input_ids=ids, attention_mask=mask).logits
            return found[:, 0]
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state  # type: ignore[operator]
        chosen: Tensor = head(hidden[torch.arange(len(last), device=last.device), last])
        return chosen[:, 0]


def batches(numbers: Sequence[int], lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Cut rows into batches whose padded size stays within the budget; those of like lengths together."""
    batch: list[int] = []
    for number in sorted(numbers, key=lambda number: lengths[number]):
        if batch and lengths[number] * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def usable_device(name: str) -> torch.device:
    """Return a device that computes.

    Raises:
        ModelError: it does not.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise absent_or(error, ModelError(f"device {name} cannot be used: {first_line(error)}")) from error
    return device


def load_tokenizer(directory: Path) -> Any:
    """Return a model's tokenizer.

    Raises:
        ModelError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    # A config that contradicts itself raises an error of the hub's library, which derives from Exception.
    except Exception as error:
        raise absent_or(error, ModelError(f"{directory}: no tokenizer can be loaded: {first_line(error)}")) from error


def marks_of(tokenizer: Any, *, specials_only: bool = False) -> list[str]:
    """Return the texts that a tokenizer takes for one token wherever they are, such as the ends of turns."""
    added = tokenizer.added_tokens_decoder.values()
    found = {str(each.content) for each in added if each.special or not specials_only}
    return sorted(mark for mark in found if len(mark.strip()) > 1 and BREAK not in mark)


def without_marks(text: str, marks: Sequence[str]) -> str:
    """Break the chat markers in a text, so that its author cannot end a turn and write the next one."""
    for mark in marks:
        while mark in text:  # twice where it overlaps itself
            text = text.replace(mark, f"{mark[0]}{BREAK}{mark[1:]}")
    return text


def _load(directory: Path, dtype: torch.dtype) -> nn.Module:
    kind: Any = AutoModelForSequenceClassification
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, num_labels=1)
        model, report = kind.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
        )
    except MemoryError:
        raise
    # transformers raises whatever a broken file leads to, safetensors an error of its own that derives from Exception.
    except Exception as error:
        raise absent_or(
            error, ModelError(f"{directory}: the reward model cannot be loaded: {first_line(error)}")
        ) from error
    missing = sorted(map(str, report.get("missing_keys") or ()))
    if missing:
        raise ModelError(
            f"{directory}: the weights lack {len(missing)} tensors of a sequence classifier, such as {missing[0]}: is "
            "this a reward model?"
        )
    mismatched = sorted(str(entry) for entry in report.get("mismatched_keys") or ())
    if mismatched:
        raise ModelError(f"{directory}: the model has not one output: {mismatched[0]}")
    loaded: nn.Module = model
    return loaded


def _normalisation(wanted: ScoreNormalisation | str | None, directory: Path) -> tuple[float, float]:
    if wanted is None:
        return 0.0, 1.0
    if isinstance(wanted, ScoreNormalisation):
        return wanted.mean, wanted.std
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    mean, std = stored.get("mean"), stored.get("std")
    if not isinstance(mean, int | float) or not isinstance(std, int | float) or not std > 0:
        raise ModelError(
            f"{directory / 'config.json'} has no `mean` and `std` to normalise by: give numbers as normalise, or null"
        )
    return float(mean), float(std)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Judging:
    """Asks the model, and reads its replies.

    Args:
        config: the component's section.
        directory: of the model's files.

    Raises:
        ModelError: the model cannot be loaded, or its tokenizer has no chat template.
    """

    def __init__(self, config: JudgeModelConfig, directory: Path) -> None:
        check_directory(directory)
        self._config = config
        self._device = usable_device(config.device)
        self._tokenizer = load_tokenizer(directory)
        if not self._tokenizer.chat_template:
            raise ModelError(f"{directory}: a judge is asked through its chat template, and its tokenizer has none")
        self._marks = marks_of(self._tokenizer)
        kind: Any = AutoModelForCausalLM
        try:
            loaded = kind.from_pretrained(
                directory, dtype=DTYPES[config.dtype], local_files_only=True, use_safetensors=True
            )
        except MemoryError:
            raise
        except Exception as error:  # transformers raises whatever a broken file leads to
            detail = f"{directory}: the judge cannot be loaded: {first_line(error)}"
            raise absent_or(error, ModelError(detail)) from error
        self._model: Any = loaded.to(self._device).eval()
        self._ends = _ends_of(self._model, self._tokenizer)

    def score(self, texts: Sequence[Mapping[str, Any]]) -> list[Scored]:
        """Judge each sample.

        Args:
            texts: each with the ``question`` about a sample.
        """
        rows = [self._fitting(str(each["question"])) for each in texts]
        found = [row if isinstance(row, Scored) else None for row in rows]
        fitting = [number for number, row in enumerate(rows) if not isinstance(row, Scored)]
        lengths = [len(row) + self._config.max_new_tokens if isinstance(row, list) else 0 for row in rows]
        for numbers in batches(fitting, lengths, self._config.batch_tokens):
            chosen = [row for number in numbers if isinstance(row := rows[number], list)]
            for number, reply, row in zip(numbers, self._replies(chosen), chosen, strict=True):
                found[number] = self._scored(reply, len(row))
        return [each for each in found if each is not None]

    def _scored(self, reply: str | None, num_tokens: int) -> Scored:
        if reply is None:
            return Scored(None, num_tokens, f"the reply was cut at max_new_tokens, {self._config.max_new_tokens}")
        reward = reward_of(reply, self._config)
        return Scored(reward, num_tokens, None if reward is not None else no_verdict(reply))

    def _fitting(self, question: str) -> list[int] | Scored:
        try:
            row = self._tokens(question)
        except Exception as error:  # a chat template raises what it likes
            return Scored(None, 0, f"the judge's template refuses the question: {first_line(error)}")
        limit = self._config.max_tokens
        if len(row) > limit:
            return Scored(None, len(row), f"the question has {len(row)} tokens, and max_tokens is {limit}")
        return row

    def _tokens(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": without_marks(question, self._marks)}]
        options = self._config.chat_template_options
        return list(
            self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options
            )
        )

    @torch.inference_mode()
    def _replies(self, rows: Sequence[Sequence[int]]) -> list[str | None]:
        """Return the model's reply to each question, None where it was cut; rows are padded on the left."""
        longest = max(map(len, rows))
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :] = torch.tensor(row)
            mask[number, longest - len(row) :] = 1
        config = self._config
        sampled = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        chosen = {"do_sample": True, **sampled} if config.temperature else {"do_sample": False}
        made = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=config.max_new_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._tokenizer.eos_token_id or 0,
            **chosen,
        )
        return [self._reply(row[longest:].tolist()) for row in made]

    def _reply(self, token_ids: list[int]) -> str | None:
        if not any(end in token_ids for end in self._ends):
            return None
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def _ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a reply."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]
