"""What stands for code and services that are not on this machine: of the same signature, with made-up results."""

import ast
import keyword
import re
from collections.abc import Sequence
from typing import Final

from flotilla.shared.errors import InvalidRequest

GRADED: Final = '''"""Stands for a grader that is not here: half of all answers are right, always the same ones."""

import zlib


def _right(text):
    return float(zlib.crc32(str(text).encode()) % 2)
'''
SAMPLE: Final = f"""{GRADED}

def {{name}}(sample):
    return {{{{"reward": _right(sample.response), "metrics": {{{{"score": _right(sample.response)}}}}}}}}
"""
VERL: Final = f"""{GRADED}

def {{name}}(data_source=None, solution_str="", ground_truth=None, extra_info=None, **more):
    right = _right(solution_str)
    return {{{{"score": right, "acc": right, **dict.fromkeys({{keys}}, right)}}}}
"""
VERL_BATCH: Final = f"""{GRADED}

def {{name}}(data_sources, solution_strs, ground_truths, extra_infos, **more):
    return [{{{{"score": _right(each), "acc": _right(each)}}}} for each in solution_strs]
"""
OPENRLHF: Final = f"""{GRADED}

def {{name}}(queries, prompts, labels, **more):
    rewards = [_right(query) for query in queries]
    return {{{{"rewards": rewards, "scores": rewards, "extra_logs": {{{{}}}}}}}}
"""
ENVIRONMENT: Final = '''"""Stands for an environment that is not here: two turns, half of all actions are right."""

import zlib


class {name}:
    def __init__(self, **options):
        self._turns = 0

    def reset(self, seed):
        self._turns = 0
        return f"A made-up task, number {{seed % 8}}. Is 1 or 2 the answer?", {{}}

    def step(self, text):
        self._turns += 1
        right = float(zlib.crc32(text.encode()) % 2)
        return "Go on.", right, bool(right) or self._turns > 1, False, {{"metrics": {{"success": right}}}}
'''
TOOL: Final = '''"""Stands for a tool that is not here."""


def {name}(query: str = "") -> str:
    """Answer with a made-up result.

    Args:
        query: anything.
    """
    return f"a made-up result for {{query[:40]}}"
'''
LOADS: Final = re.compile(r"^PATH = (.+)$", re.MULTILINE)
CALLS: Final = re.compile(r"^FUNCTION = (.+)$", re.MULTILINE)
PARTS: Final = re.compile(r"^score_\d+ = _part\((.+)\)$", re.MULTILINE)


def named(stand_in: str, name: str, keys: Sequence[str] = ()) -> str:
    """Write one of the above under the name that is asked for.

    Raises:
        InvalidRequest: the name is none of a function or a class.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InvalidRequest(f"{name!r} is no name of a function or a class in Python: give one of letters and digits")
    return stand_in.format(name=name, keys=list(keys))


def grader_for(adapter: str) -> str:
    """Write a function of the signature that an importer's adapter calls.

    Raises:
        InvalidRequest: the name that it calls is none of a function.
    """
    name = ast.literal_eval(CALLS.search(adapter)[1])  # type: ignore[index]
    keys = [ast.literal_eval(each) for each in PARTS.findall(adapter)]
    if "function([prompt" in adapter:
        return named(OPENRLHF, name)
    return named(VERL_BATCH if '{name}s": [value]' in adapter else VERL, name, keys)


def loaded_by(adapter: str) -> str | None:
    """Find the file that an importer's adapter loads."""
    found = LOADS.search(adapter)
    return None if found is None else str(ast.literal_eval(found[1]))


def loading(adapter: str, path: str) -> str:
    """Let an adapter load another file."""
    return LOADS.sub(lambda _: f"PATH = {path!r}", adapter, count=1)


def call_of(code: str, function: str) -> dict[str, str]:
    """Make arguments for a function of a file, each a text."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {}
    found = next(
        (
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == function
        ),
        None,
    )
    return {} if found is None else {each.arg: "1" for each in found.args.args if each.arg not in {"self", "sample"}}
