"""Write Harbor task folders of the arithmetic problems: one problem a folder, graded by its own tests.

python examples/harbor/make_tasks.py train.jsonl examples/harbor/prepared/tasks --count 200
"""

import argparse
import json
from pathlib import Path

CONFIG = """version = "1.0"

[metadata]
category = "arithmetic"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
"""
DOCKERFILE = """FROM python:3.12-slim
WORKDIR /app
COPY README.txt .
"""
TESTS = """#!/bin/sh
# The answer is right, or it is not; a task may give anything between.
if [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def write_task(folder: Path, prompt: str, answer: str) -> None:
    """Write one task."""
    files = {
        "task.toml": CONFIG,
        "instruction.md": f"{prompt}\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/README.txt": "The answer belongs into answer.txt.\n",
        "tests/test.sh": TESTS,
        "tests/expected.txt": f"{answer}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("problems", type=Path, help="of examples/arithmetic/prepare.py")
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_args()
    for number, line in enumerate(arguments.problems.read_text(encoding="utf-8").splitlines()[: arguments.count]):
        problem = json.loads(line)
        write_task(arguments.output / f"sum-{number:04d}", problem["prompt"], str(problem["answer"]))


if __name__ == "__main__":
    main()
