"""Reward functions of other systems' contracts, wrapped in a file that our reward service can load.

The file is written beside the spec; when the experiment starts it loads the user's own file, relative to its folder.
"""

from pathlib import PurePosixPath
from typing import Final

from shared.config.importers.spelling import experiment_name

HEAD: Final = '''"""Calls {function}() of {path} as {system} does. Written by `flotilla import {system}`."""

import importlib.util
import inspect
import json
from pathlib import Path

PATH = {path!r}
FUNCTION = {function!r}


def _load():
    path = Path(__file__).resolve().parent / Path(PATH).expanduser()
    spec = importlib.util.spec_from_file_location("imported_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, FUNCTION)


function = _load()
'''

VERL: Final = '''

def _arguments(sample):
    """verl's label is a column with style and ground_truth; it passes the latter alone."""
    truth = sample.label
    try:
        column = json.loads(sample.label)
    except (TypeError, ValueError):
        column = None
    if isinstance(column, dict) and "ground_truth" in column:
        truth = column["ground_truth"]
    return {
        "data_source": sample.data_source,
        "solution_str": sample.response,
        "ground_truth": truth,
        "extra_info": sample.metadata.get("extra_info") or {},
    }


def _grade(found):
    """A number, or a mapping with score; its other numbers become metrics."""
    if not isinstance(found, dict):
        return float(found)
    metrics = {name: float(value) for name, value in found.items() if name != "score" and _is_number(value)}
    return {"reward": float(found["score"]), "metrics": metrics}


def _is_number(value):
    return isinstance(value, (bool, int, float))


if inspect.iscoroutinefunction(function):

    async def score(sample):
        return _grade(await function(**_arguments(sample)))

else:

    def score(sample):
        return _grade(function(**_arguments(sample)))
'''

OPENRLHF: Final = '''

def _first(values):
    """Take the one value out of a list or tensor, or a number as it is."""
    try:
        return float(values[0])
    except (TypeError, IndexError):
        return float(values)


def score(sample):
    prompt = sample.prompt
    found = function([prompt + sample.response], [prompt], ["" if sample.label is None else sample.label])
    if not isinstance(found, dict):
        return _first(found)
    metrics = {name: _first(values) for name, values in (found.get("extra_logs") or {}).items()}
    if found.get("scores") is not None:
        metrics["score"] = _first(found["scores"])
    return {"reward": _first(found["rewards"]), "metrics": metrics}
'''


def adapter_name(path: str, function: str) -> str:
    """Name the file that a function is wrapped in."""
    return f"{experiment_name(PurePosixPath(path).stem)}_{experiment_name(function)}_adapter.py"


def verl_adapter(path: str, function: str) -> str:
    """Write a module whose ``score(sample)`` calls verl's ``function(data_source, solution_str, ...)``."""
    return HEAD.format(path=path, function=function, system="verl") + VERL


def openrlhf_adapter(path: str) -> str:
    """Write a module whose ``score(sample)`` calls OpenRLHF's ``reward_func(queries, prompts, labels)``."""
    text = HEAD.format(path=path, function="reward_func", system="openrlhf") + OPENRLHF
    return text.replace("import inspect\nimport json\n", "")
