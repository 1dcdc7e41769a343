"""A task whose prompts differ in how long their answers are: most are short, some are very long.

A tiny model is taught, for each size that a prompt names, to end its answer at each token with a probability that
belongs to the size. So lengths are random, and their distribution is a matter of the prompt.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from examples.arithmetic.model import build_model
from examples.arithmetic.settings import ModelSettings
from examples.arithmetic.tokenizer import build_tokenizer, prompt_ids
from tests.fleet import make_experiment

MEAN_LENGTHS = (4, 4, 5, 6, 7, 9, 12, 17, 27, 54)
"""Mean tokens of an answer by the size that its prompt names: the slowest takes thirteen times the fastest."""
MAX_NEW_TOKENS = 128
LETTERS = "abcdefgh"
ROWS = 200
TAUGHT_TOKENS = 48
STEPS = 200
LEARNING_RATE = 3e-3

GRADER = '''
"""Half of all answers are right, the same ones in every process; the length of each is noted."""
import pathlib, zlib

NOTES = pathlib.Path(__file__).with_name("lengths")


def score(sample):
    with NOTES.open("a") as notes:
        notes.write(f"{sample.id.split('/')[0]} {len(sample.response)}\\n")
    return float(zlib.crc32((sample.id + sample.response).encode()) % 2)
'''


def prompt_of(row: int) -> str:
    """Write the prompt of a dataset row."""
    return f"Task {row}, size {row % len(MEAN_LENGTHS)}."


def make_long_tailed(directory: Path, **sections: Any) -> dict[str, Any]:
    """Write model, data and grader, and give a spec that uses them; the grader notes lengths in a file."""
    teach(directory / "model")
    spec = make_experiment(
        directory,
        **{
            "rollout": {
                "group_size": 4,
                "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
                "engine": {"slots": 24, "context_tokens": MAX_NEW_TOKENS + 64},
            },
            "data": {"path": str(directory / "train.jsonl"), "label_column": "answer", "shuffle": False},
            **sections,
        },
    )
    rows = [{"prompt": prompt_of(row), "answer": "0"} for row in range(ROWS)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "grade.py").write_text(GRADER)
    return spec


def teach(directory: Path) -> None:
    """Make the model and save it with its tokenizer; takes seconds."""
    tokenizer = build_tokenizer([prompt_of(row) for row in range(ROWS)], 320)
    model = build_model(ModelSettings(), tokenizer, seed=0)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    chance = Random(0)
    for _ in range(STEPS):
        # Numbers of as many digits, so that the prompts are as long as each other and need no padding.
        tens = chance.choice((0, chance.randrange(1, 10), chance.randrange(10, ROWS // 10)))
        rows = [10 * tens + size for size in range(len(MEAN_LENGTHS))]
        loss = _loss(model, prompt_ids(tokenizer, [prompt_of(row) for row in rows]), letters, tokenizer, chance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _loss(model: Any, prompts: list[list[int]], letters: list[int], tokenizer: Any, chance: Random) -> Tensor:
    """Cross-entropy with the wanted distribution at every place of an answer to a prompt of each size."""
    answers = [[chance.choice(letters) for _ in range(TAUGHT_TOKENS)] for _ in prompts]
    tokens = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    log_probs = model(tokens).logits[:, len(prompts[0]) - 1 : -1].log_softmax(-1)
    hazard = (1 / torch.tensor(MEAN_LENGTHS)).unsqueeze(1)
    of_letters = log_probs[..., letters].mean(dim=-1)
    return -(hazard * log_probs[..., tokenizer.eos_token_id] + (1 - hazard) * of_letters).mean()
