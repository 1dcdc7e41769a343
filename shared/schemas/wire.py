"""The bases of all that goes over the wire: frozen models whose attributes' docstrings describe them.

Models whose fields' docstrings become descriptions when a schema is asked for, and cost nothing before.

pydantic's own ``use_attribute_docstrings`` parses the source of each class as it is imported: a quarter of a second of
every process that starts, of which hardly one makes a schema.
"""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue

from flotilla.shared.files.beneath import Outside, components


class Described(BaseModel):
    """A model whose fields are described by the docstrings under them."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """Make the JSON schema, with descriptions."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions_of(cls).items():
            shown = properties.get(cls.model_fields[name].alias or name)
            if shown is not None and cls.model_fields[name].description is None:
                shown["description"] = text
        return schema


@cache
def descriptions_of(model: type[BaseModel]) -> dict[str, str]:
    """Read what is written under the fields of a model and of those that it inherits from: field to text."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Described) and base is not Described:
            found |= {name: text for name, text in _docstrings(base).items() if name in model.model_fields}
    return found


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    definition = _classes_of(model.__module__).get(model.__qualname__)
    statements = [] if definition is None else definition.body
    found: dict[str, str] = {}
    for statement, below in pairwise(statements):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[statement.target.id] = inspect.cleandoc(below.value.value)
    return found


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Parse a module once for all of its classes: to look for each costs as much."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # it has no file
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


class Wire(Described):
    """A body written by hand, or one that never leaves one release: unknown keys are refused."""

    # JSON has no infinities: what Python's parser accepts could not be sent in an answer.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TolerantWire(Wire):
    """A message to or from another program, or another release: unknown fields are ignored, so that some can be added.

    The messages between services and gateway are in ``tests/contract/releases``, by release.
    """

    model_config = ConfigDict(extra="ignore")


def _is_plain(name: str) -> str:
    try:
        components(name)
    except Outside as error:
        raise ValueError(error.strerror) from None
    return name


PlainName = Annotated[str, AfterValidator(_is_plain)]
"""The name of a file below a folder, such as ``model/config.json``."""


Model = TypeVar("Model", bound=Wire)


def assembled(model: type[Model], values: dict[str, Any]) -> Model:
    """Make a message of values for all of its fields that are known to be right: nothing is checked or copied.

    It takes a fifth of the time that the class takes, which matters where each of many samples has one.
    """
    made = object.__new__(model)
    _set(made, "__dict__", values)
    _set(made, "__pydantic_fields_set__", set(values))
    _set(made, "__pydantic_extra__", None)
    _set(made, "__pydantic_private__", None)
    return made


_set = object.__setattr__
