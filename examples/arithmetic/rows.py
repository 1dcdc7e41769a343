"""Writes the problems that the example trains on, and those that are held out."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from .problems import Problem, chain_of, heldout_set, training_set
from .settings import Settings


def write_problems(
    directory: Path, settings: Settings, say: Callable[[str], None]
) -> tuple[list[Problem], list[Problem]]:
    """Write ``train.jsonl`` and ``heldout.jsonl``; returns the problems of both.

    Args:
        say: writes a line of progress.
    """
    rng = random.Random(f"problems {settings.seed}")
    training = training_set(settings.num_train, settings.problems, rng)
    heldout = heldout_set(settings.num_heldout, settings.problems, rng)
    write_rows(directory / "train.jsonl", training)
    write_rows(directory / "heldout.jsonl", heldout)
    say(f"{len(training)} training problems, {len(heldout)} held out; for example: {training[0].prompt}")
    return training, heldout


def write_rows(path: Path, problems: list[Problem]) -> None:
    """Write one JSON object per line: prompt, answer (a string) and chain."""
    with path.open("w") as file:
        for problem in problems:
            row = {"prompt": problem.prompt, "answer": str(problem.answer), "chain": chain_of(problem)}
            file.write(json.dumps(row) + "\n")
