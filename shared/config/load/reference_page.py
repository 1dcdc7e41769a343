"""Write the reference of the spec from its classes: ``python -m flotilla.shared.config.load.reference_page``."""

import json
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.wire import descriptions_of

HEAD = """# Configuration

Every key of an experiment spec, made from the classes in `shared/config/sections/`
(`python -m flotilla.shared.config.load.reference_page`; a test keeps this page current).
A spec is YAML or JSON. An unknown key is an error that names the nearest valid one; a
key that would have no effect under the other settings is an error too. Relative paths are taken from the spec file's
folder.

A number is written as a number and a truth as `true` or `false`: text in quotes, `true` for a number and `1` or `"on"`
for a truth are refused, wherever they come from. `1e-5` is a number, and so is `1e3` where a whole one is wanted.

Any key can be overridden, with a value in YAML: by `--set optimisation.steps=10` on the command line, and by a variable
of the environment, `FLOTILLA_SPEC__OPTIMISATION__STEPS=10`: two underscores between names, an index for an item of a
list (`FLOTILLA_SPEC__REWARD__COMPONENTS__0__WEIGHT=2`). The command line beats the environment, and that the file.
`flotilla run`, `start` and `spec` all read them; `flotilla spec show FILE` says where each value comes from.

A launch file may hold one more section, `prepare`, which the command line runs before it sends the spec (the gateway
never runs it): `command` (a list; `python` stands for the interpreter that runs flotilla) and `output` (what the
command makes; two runs never make it at the same time). `{seed}` anywhere in a launch file stands for the
experiment's seed.
"""


def render() -> str:
    """Render the whole page."""
    return HEAD + "".join(_section(ExperimentSpec, "", set()))


def _section(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    title = path or "experiment"
    yield f"\n## `{title}`\n\n{_first_paragraphs(model)}\n\n"
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {_meaning(model, name)} |\n"
        nested += [(f"{path}.{name}" if path else name, inner) for inner in _models(field.annotation)]
    for inner_path, inner in nested:
        if inner in seen:
            continue
        seen.add(inner)
        kind = inner.model_fields.get("kind") or inner.model_fields.get("placement")
        tag = f" ({get_args(kind.annotation)[0]})" if kind is not None and get_args(kind.annotation) else ""
        yield from _section(inner, inner_path + tag, seen)


def _first_paragraphs(model: type[BaseModel]) -> str:
    lines = [line.strip() for line in (model.__doc__ or "").strip().splitlines()]
    return "\n".join(lines)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _type(field: FieldInfo) -> str:
    models = _models(field.annotation)
    if models and _is_list(field.annotation):
        return "list of sections"
    if models:
        return "section" if len(models) == 1 else "one of several sections"
    name = _name(field.annotation)
    bounds = [_bound(item) for item in field.metadata]
    return ", ".join([name, *(bound for bound in bounds if bound)])


def _name(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " or ".join(member.value for member in annotation)
    if annotation is type(None):
        return "null"
    if annotation is JsonValue:
        return "any value"
    if get_origin(annotation) is Mapping or get_origin(annotation) is dict:
        return f"mapping of {_name(arguments[0])} to {_name(arguments[1])}"
    if get_origin(annotation) is Annotated:
        return _name(arguments[0])
    if arguments and get_origin(annotation) is tuple:
        return "list of " + _name(arguments[0])
    if arguments:
        return " or ".join(_name(argument) for argument in arguments)
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) in {Union, UnionType, Annotated}:
        return any(_is_list(argument) for argument in get_args(annotation))
    return get_origin(annotation) is tuple


def _bound(item: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return " ".join(
        f"{sign} {getattr(item, name)}" for name, sign in signs.items() if getattr(item, name, None) is not None
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "as below"
    if isinstance(default, tuple) and any(isinstance(item, BaseModel) for item in default):
        return "as below"
    # As it is written in a spec; text of several lines would end the table's row.
    shown = default if isinstance(default, str) else json.dumps(default, default=str)
    return f"`{shown}`".replace("|", "\\|").replace("\n", "\\n") if shown else "empty"


def _meaning(model: type[BaseModel], name: str) -> str:
    # A section that only changes an inherited default adds nothing about the key.
    field = model.model_fields[name]
    description = descriptions_of(model).get(name, field.description)
    if description is None and get_origin(field.annotation) is Literal:
        return "Chooses this variant."
    if description is None:
        models = _models(field.annotation)
        return _first_paragraphs(models[0]).split("\n\n")[0].replace("\n", " ") if len(models) == 1 else ""
    return " ".join(description.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
