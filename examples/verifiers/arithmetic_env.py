"""An environment of the `verifiers` package, written without this fleet in mind: chains of sums, graded by a rubric."""

import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def load_environment(path: str, num_rows: int = 2000) -> vf.Environment:
    """Make the environment from problems that examples/arithmetic/prepare.py made."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[:num_rows]
    problems = [json.loads(line) for line in lines]
    rows = [
        {"prompt": [{"role": "user", "content": each["prompt"]}], "answer": str(each["answer"])} for each in problems
    ]
    parser = vf.Parser(extract_fn=lambda text: text.rpartition("####")[2].strip())

    def is_right(completion: vf.Messages, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=vf.Rubric(funcs=[is_right]))
