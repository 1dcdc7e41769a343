"""A causal language model as judge: it replies to questions, and its replies are read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from flotilla.services.reward.scoring.scorer import (
    DTYPES,
    Scored,
    batches,
    first_line,
    load_tokenizer,
    marks_of,
    usable_device,
    without_marks,
)
from flotilla.services.reward.verdicts import no_verdict, reward_of
from flotilla.shared.config.sections.judge import JudgeModelConfig
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import check_directory
from flotilla.shared.net.absence import absent_or


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
