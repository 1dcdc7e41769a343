"""What verl's ``data`` section means together: rows, their columns, long prompts, a class of the user's."""

from collections.abc import Mapping
from typing import Any

from flotilla.importers.adapter import adapter_name, verl_rows_adapter
from flotilla.importers.datasets import FILES, held_out, training
from flotilla.importers.parameter import UNSET, Inherit
from flotilla.importers.source import Source
from flotilla.importers.values import wrong
from flotilla.importers.verl.data import KNOWN_SAMPLER, TEMPLATE
from flotilla.shared.config.sections.data import VERL_COLUMNS, is_data_file

Fields = dict[str, Any]

SIDES = {"error": None, "left": "left", "right": "right", "middle": "middle"}
CLASS = "data.custom_cls"


def rows(source: Source) -> Fields:
    """Make the training rows, their columns and template, and what becomes of long prompts."""
    fields = training(_places(source, "data.train_files")) | _columns(source) | _overlong(source) | _order(source)
    options: Fields = {}
    for spelling, value in source.trees.get(TEMPLATE, {}).items():
        name = spelling.removeprefix(TEMPLATE).removeprefix(".")
        if not name and value and not isinstance(value, Mapping):
            raise wrong(spelling, value, "a mapping of options")
        options |= {name: value} if name else value or {}
    return fields | ({"data.chat_template_options": options} if options else {})


def held_out_rows(source: Source) -> Fields:
    """Make the held-out sets, if there are any."""
    if not source.has("data.val_files") or not source.value("data.val_files"):
        return {}
    places, most = _places(source, "data.val_files"), source.value("data.val_max_samples")
    if most is not None and most >= 0:
        if len(places) > 1:
            source.refuse(
                "data.val_max_samples", "the first rows of several files together: set max_rows of evaluation.sets"
            )
        places = [{**place, "max_rows": most} for place in places[:1]] + places[1:]
    return held_out(places)


def _places(source: Source, name: str) -> list[Fields]:
    files, path = source.value(name) or [], source.value(f"{CLASS}.path")
    if path is None:
        if not files or not all(is_data_file(file) for file in files):
            source.refuse(name, f"must be {FILES}")
        return [{"path": file} for file in files] or [{"path": ""}]
    class_name = source.value(f"{CLASS}.name")
    if class_name is None:
        source.lack("data.sources: data.custom_cls.path names a file: give data.custom_cls.name, the class in it")
        class_name = "Dataset"
    if not class_name.isidentifier():
        source.refuse(f"{CLASS}.name", f"{class_name!r} is no name of a class")
        class_name = "Dataset"
    file = adapter_name(path, class_name)
    source.files[file] = verl_rows_adapter(path, class_name)
    options = {
        "data_files": files,
        "tokenizer": source.value("actor_rollout_ref.model.path"),
        "config": _settings(source),
    }
    return [{"custom": f"{file}:Rows", "options": options}]


def _settings(source: Source) -> Fields:
    """Return the section ``data`` as the class would read it."""
    found: Fields = {}
    for row in source.system.parameters.values():
        section, _, name = row.name.partition(".")
        if section != "data" or "." in name or row.is_tree:
            continue
        given = source.given.get(row.name)
        value = row.default if given is None else row.convert(given.spelling, given.value)
        if value is not UNSET and not isinstance(value, Inherit):
            found[name] = value
    return found


def _columns(source: Source) -> Fields:
    named = {
        "prompt_column": source.value("data.prompt_key"),
        "label_column": VERL_COLUMNS["label_column"],
        "data_source_column": source.value("data.reward_fn_key"),
    }
    if named == VERL_COLUMNS:
        return {"data.format": "verl"}
    return {f"data.{name}": column for name, column in named.items()}


def _order(source: Source) -> Fields:
    """Make the order of rows, where a class of verl's own draws them."""
    name, path = (source.value(f"data.sampler.class_{what}") for what in ("name", "path"))
    if name is None and path is None:
        return {}
    if (name, path) != ("RandomCurriculumSampler", KNOWN_SAMPLER):
        for what in ("name", "path"):
            if f"data.sampler.class_{what}" in source.given:
                source.refuse(f"data.sampler.class_{what}", source.system.parameters["data.sampler"].reason)
        return {}
    return {"data.shuffle": True}


def _overlong(source: Source) -> Fields:
    if source.value("data.filter_overlong_prompts"):
        workers = source.value("data.filter_overlong_prompts_workers")
        return {"data.overlong": {"kind": "filter", "workers": workers or 1}}
    side = source.choose("data.truncation", SIDES)
    return {} if side is None else {"data.overlong": {"kind": "truncate", "side": side}}
