"""The arithmetic problems with answers: demonstrations that work them out, pairs of a worked answer and a guess, and
one of the two with a label that says which."""

import json
from pathlib import Path
from typing import Any


def worked(chain: str) -> str:
    """Write a chain such as ``47+8-5`` as it is worked out: ``47+8=55; 55-5=50 #### 50``."""
    parts = chain.replace("-", "+-").split("+")
    total, steps = int(parts[0]), []
    for part in parts[1:]:
        steps.append(f"{total}{int(part):+d}={total + int(part)}")
        total += int(part)
    return f"{'; '.join(steps)} #### {total}"


class Rows:
    """Problems of a file, each with ``response``, ``chosen``, ``rejected``, ``completion`` and ``label`` besides.

    Args:
        path: of a file that ``examples/arithmetic/prepare.py`` made, from this folder.
        num_rows: the first ones; None takes all.
    """

    def __init__(self, path: str, num_rows: int | None = None) -> None:
        lines = (Path(__file__).parent / path).read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines[:num_rows]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self._rows[number]
        answer = worked(row["chain"])
        guess = f"#### {int(row['answer']) + 1 + number % 9}"
        label = number % 2 == 0
        pair = {"chosen": answer, "rejected": guess}
        return {**row, **pair, "response": answer, "completion": answer if label else guess, "label": label}
