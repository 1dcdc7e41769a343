"""How a problem is answered, rightly with the calculator or by a guess, as tokens that a model learns from."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.problems import Problem, chain_of, guess_near, terse_answer
from examples.arithmetic.tokenizer import TURN_END
from flotilla.services.rollout.tools.base import Schema, schema_of

from .calculator import calculator
from .tokenizer import CLOSE, OPEN

SCHEMA: Schema = schema_of(calculator)


def call_of(problem: Problem) -> str:
    """Write the call that solves a problem, in the Hermes format."""
    call = {"name": calculator.__name__, "arguments": {"expression": chain_of(problem)}}
    return f"{OPEN}\n{json.dumps(call)}\n{CLOSE}"


@dataclass(frozen=True)
class Conversation:
    """One demonstration: pieces of text, as they are tokenised, each shown or said by the model."""

    pieces: tuple[tuple[str, bool], ...]


class Demonstrations:
    """Writes conversations, and lays them out as batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, guess_error: int, rng: random.Random) -> None:
        self._tokenizer, self._guess_error, self._rng = tokenizer, guess_error, rng

    def prompt(self, problem: Problem) -> str:
        """Render what the model is shown first, as a rollout will."""
        chat = [{"role": "user", "content": problem.prompt}]
        options = {"tools": [SCHEMA], "tokenize": False, "add_generation_prompt": True}
        return str(self._tokenizer.apply_chat_template(chat, **options))

    def with_call(self, problem: Problem) -> Conversation:
        """Call the calculator, read its result, and say it."""
        shown = f"\n<|im_start|>tool\n{problem.answer}{TURN_END}\n<|im_start|>assistant\n"
        return Conversation(
            (
                (self.prompt(problem), False),
                (call_of(problem) + TURN_END, True),
                (shown, False),
                (terse_answer(problem.answer) + TURN_END, True),
            )
        )

    def guess(self, problem: Problem) -> Conversation:
        """Say a number that may be right."""
        said = terse_answer(guess_near(problem, self._guess_error, self._rng))
        return Conversation(((self.prompt(problem), False), (said + TURN_END, True)))

    def batch(self, conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
        """Lay conversations out, padded on the right.

        Returns:
            input_ids [B, T] int64, and [B, T] bool, True where the model says the token.
        """
        rows = []
        for each in conversations:
            ids: list[int] = []
            said: list[bool] = []
            for text, is_said in each.pieces:
                own = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += own
                said += [is_said] * len(own)
            rows.append((ids, said))
        length = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((len(rows), length), self._tokenizer.pad_token_id)
        is_said = torch.zeros((len(rows), length), dtype=torch.bool)
        for row, (ids, said) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            is_said[row, : len(ids)] = torch.tensor(said)
        return input_ids, is_said
