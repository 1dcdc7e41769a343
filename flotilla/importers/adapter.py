"""Reward functions of other systems' contracts, wrapped in a file that our reward service can load.

The file is written beside the spec; when the experiment starts it loads the user's own file, relative to its folder.
What a launch file says comes into the code as literals alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from flotilla.importers.spelling import experiment_name

NO_MORE: Final[Mapping[str, Any]] = MappingProxyType({})

HEAD: Final = '''"""Calls FUNCTION of the file PATH as {system} does. Written by `flotilla import {system}`."""

import functools
import importlib.util
import inspect
import json
import sys
from pathlib import Path

PATH = {path!r}
FUNCTION = {function!r}
MORE = {more!r}


def _load():
    path = Path(__file__).resolve().parent / Path(PATH).expanduser()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("imported_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return functools.partial(getattr(module, FUNCTION), **MORE) if MORE else getattr(module, FUNCTION)


function = _load()
'''

VERL: Final = '''

def _arguments(sample):
    """verl's label is the ground_truth inside the column reward_model, passed as it stands there."""
    truth, column = sample.label, sample.metadata.get("reward_model")
    try:
        column = json.loads(column) if isinstance(column, str) else column
    except ValueError:
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

KEYS: Final = '''

def _part(key):
    """Make what gives one of the numbers that the function returns."""
    if inspect.iscoroutinefunction(function):

        async def part(sample):
            return float((await function(**_arguments(sample)))[key])

    else:

        def part(sample):
            return float(function(**_arguments(sample))[key])

    return part


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

ROWS: Final = '''"""Reads rows through NAME of the file PATH as verl does. Written by `flotilla import verl`."""

import importlib.util
import inspect
import sys
from pathlib import Path

PATH = {path!r}
NAME = {name!r}
HERE = Path(__file__).resolve().parent
PLAIN = (str, bool, int, float, list, tuple, dict, type(None))


class Config(dict):
    """Gives its values as attributes, too."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Rows:
    """The user's dataset, by columns; tensors and images are left out."""

    def __init__(self, data_files, tokenizer, config):
        make = _load()
        parameters = inspect.signature(make).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        offered = {{
            "data_files": lambda: [_place(file) for file in data_files],
            "tokenizer": lambda: _tokenizer(tokenizer),
            "config": lambda: Config(config),
            "processor": lambda: None,
        }}
        self._prompt = config["prompt_key"]
        self._rows = make(**{{name: value() for name, value in offered.items() if takes_any or name in parameters}})

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        row = dict(self._rows[index])
        if self._prompt not in row and "raw_prompt" in row:
            row[self._prompt] = list(row.pop("raw_prompt"))
        return {{name: value for name, value in row.items() if isinstance(value, PLAIN)}}


def _load():
    sys.path.insert(0, str(Path(_place(PATH)).parent))
    spec = importlib.util.spec_from_file_location("imported_rows", _place(PATH))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, NAME)


def _place(path):
    return path if "://" in path else str(HERE / Path(path).expanduser())


def _tokenizer(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_place(path), local_files_only=True)
'''


def adapter_name(path: str, function: str) -> str:
    """Name the file that a function is wrapped in."""
    return f"{experiment_name(PurePosixPath(path).stem)}_{experiment_name(function)}_adapter.py"


def verl_adapter(path: str, function: str, more: Mapping[str, Any] = NO_MORE) -> str:
    """Write a module whose ``score(sample)`` calls verl's ``function(data_source, solution_str, ..., **more)``."""
    return HEAD.format(path=path, function=function, system="verl", more=dict(more)) + VERL


def verl_keys_adapter(path: str, function: str, keys: Sequence[str], more: Mapping[str, Any] = NO_MORE) -> str:
    """Write the same, with a function besides for each key that verl's returns: ``score_0``, ``score_1``, ..."""
    parts = "".join(f"score_{number} = _part({key!r})\n" for number, key in enumerate(keys))
    return f"{verl_adapter(path, function, more)}{KEYS}{parts}"


def verl_rows_adapter(path: str, name: str) -> str:
    """Write a module whose ``Rows`` reads a dataset class that is made for verl."""
    return ROWS.format(path=path, name=name)


def verl_batch_adapter(path: str, function: str, more: Mapping[str, Any] = NO_MORE) -> str:
    """Write the same for a function of verl's manager ``batch``, which takes and gives lists: here of one answer."""
    plain = "function(**_arguments(sample))"
    listed = 'function(**{f"{name}s": [value] for name, value in _arguments(sample).items()})'
    # Not in what a path became: there it would end the text.
    calls = VERL.replace(f"await {plain}", f"(await {listed})[0]").replace(plain, f"{listed}[0]")
    return HEAD.format(path=path, function=function, system="verl", more=dict(more)) + calls


def openrlhf_adapter(path: str) -> str:
    """Write a module whose ``score(sample)`` calls OpenRLHF's ``reward_func(queries, prompts, labels)``."""
    text = HEAD.format(path=path, function="reward_func", system="openrlhf", more={}) + OPENRLHF
    return text.replace("import inspect\nimport json\n", "")


OF_TRL: Final = '''"""{what} of a script for TRL, with what it needs of it. Written by `flotilla import trl`."""

import sys as _sys
from pathlib import Path as _Path

_sys.path.insert(0, str(_Path(__file__).resolve().parent))

{code}
'''
TRL_ROWS: Final = '''
PLAIN = (str, bool, int, float, list, tuple, dict, type(None))


class Rows:
    """The script's rows, by columns."""

    def __init__(self):
        self._rows = rows["train"] if isinstance(rows, dict) else rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return {name: value for name, value in dict(self._rows[index]).items() if isinstance(value, PLAIN)}
'''
TRL_GRADER: Final = '''
import inspect as _inspect

LABEL = {label!r}


def _arguments(sample, metrics):
    """What TRL passes, of one answer: prompts, completions and the row's other columns, each as a list."""
    is_chat = bool(sample.messages)
    prompt = [{{"role": each.role, "content": each.content}} for each in sample.messages] if is_chat else sample.prompt
    completion = [{{"role": "assistant", "content": sample.response}}] if is_chat else sample.response
    columns = dict(sample.metadata)
    if LABEL is not None and sample.label is not None:
        columns[LABEL] = sample.label
    return {{
        **{{name: [value] for name, value in columns.items()}},
        "prompts": [prompt],
        "completions": [completion],
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: metrics.__setitem__(name, float(value)),
    }}


def _call(sample, metrics):
    given = _arguments(sample, metrics)
    parameters = _inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        given = {{each.name: given[each.name] for each in parameters if each.name in given}}
    return function(**given)


def _grade(found, metrics):
    value = list(found)[0]
    if value is None or value != value:
        return None
    return {{"reward": float(value), "metrics": metrics}}


if _inspect.iscoroutinefunction(function):

    async def score(sample):
        metrics = {{}}
        return _grade(await _call(sample, metrics), metrics)

else:

    def score(sample):
        metrics = {{}}
        return _grade(_call(sample, metrics), metrics)
'''


def trl_rows_adapter(code: str) -> str:
    """Write a module whose ``Rows`` gives what ``rows`` is in a script's own code."""
    return OF_TRL.format(what="Rows", code=code) + TRL_ROWS


def trl_adapter(code: str, label: str | None) -> str:
    """Write a module whose ``score(sample)`` calls ``function(prompts, completions, **columns)`` of a script's code.

    Args:
        code: that defines it.
        label: the column that the spec takes as label, which is passed as that column.
    """
    return OF_TRL.format(what="A reward function", code=code) + TRL_GRADER.format(label=label)
