"""The base of all configuration: strict, frozen, described by its docstrings.

Which written values a field takes: numbers as numbers, truth as ``true`` or ``false``, and neither for the other.

Pydantic would read ``true`` as 1, ``"3"`` as 3 and ``1`` or ``"off"`` as a truth: what was meant is then guessed. What
loses nothing is taken: a whole number where a fraction may stand, ``1e3`` or ``3.0`` where a whole number is wanted.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from flotilla.shared.schemas.wire import Described

NUMBERS = frozenset({int, float})


def is_guessed(annotation: Any) -> bool:
    """Return whether a type holds a number or a truth somewhere, so that ``check_exact`` has something to check."""
    options = _options(annotation)
    if options & {int, float, bool}:
        return True
    return any(get_origin(option) is not Literal and any(map(is_guessed, get_args(option))) for option in options)


def check_exact(value: Any, annotation: Any, where: str = "") -> None:
    """Refuse a value that would have to be guessed.

    Args:
        value: as it was written.
        annotation: the field's type.
        where: of an item of a list or mapping, as words before the message.

    Raises:
        ValueError: it is of another type than the field; the message names the expected one.
    """
    options = _options(annotation)
    if isinstance(value, bool):
        if options & NUMBERS and bool not in options:
            raise ValueError(f"{where}a number is wanted, not true or false")
    elif isinstance(value, str):
        _check_text(value, options, where)
    elif isinstance(value, int | float):
        if bool in options and not options & NUMBERS:
            raise ValueError(f"{where}true or false is wanted, not a number")
    elif isinstance(value, Sequence):
        for number, item in enumerate(value):
            _check_item(item, options, number, f"{where}item {number}: ")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_item(item, options, key, f"{where}{key}: ")


def _check_text(value: str, options: frozenset[Any], where: str) -> None:
    if str in options or any(get_origin(option) is Literal and value in get_args(option) for option in options):
        return
    if options & NUMBERS and _is_number(value):
        raise ValueError(f"{where}a number is wanted, not text: write it without quotes")
    if bool in options and not options & NUMBERS:
        raise ValueError(f"{where}true or false is wanted, without quotes")


def _check_item(item: Any, options: frozenset[Any], key: Any, where: str) -> None:
    """Check an item of a list or mapping against the first kind of it that the field takes."""
    for option in options:
        kind, arguments = get_origin(option), get_args(option)
        if isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(key, str):
            check_exact(item, arguments[1], where)
            return
        if kind in {list, tuple} and isinstance(key, int):
            of_item = arguments[0] if kind is list or arguments[-1] is Ellipsis else dict(enumerate(arguments)).get(key)
            check_exact(item, of_item, where)
            return


@cache
def _options(annotation: Any) -> frozenset[Any]:
    """List the types that a field takes, with unions and annotations opened."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return frozenset().union(*map(_options, get_args(annotation)))
    return frozenset({annotation})


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


Fraction = Annotated[float, Field(ge=0, lt=1)]
"""At least 0 and below 1."""
Device = Annotated[str, Field(pattern=r"^(?:cpu|cuda(?::[0-9]+)?)$")]
"""A torch device that is tested: cpu, cuda, cuda:1."""
DeviceChoice = Annotated[str, Field(pattern=r"^(?:auto|cpu|cuda(?::[0-9]+)?)$")]
"""The same, or ``auto``: GPUs where those that compute have some, else the CPU. Decided when services are assigned."""
DeviceCount = Annotated[int, Field(ge=1)] | Literal["auto"]
"""How many GPUs a service must have; ``auto``: as many as what computes on them needs."""

Threads = Annotated[int, Field(ge=1)] | Literal["auto"]
"""How many threads a process computes with; ``auto``: as many as there are cores for it now (``host/cores.py``)."""


def check_order(name: str, bounds: tuple[float | None, float | None]) -> None:
    """Check that two bounds leave room between them.

    Raises:
        ValueError: the first is not below the second.
    """
    low, high = bounds
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{name} must be (low, high) with low below high, got ({low:g}, {high:g}): swap them")


class TextConfig(Described):
    """A frozen section whose values may come as text, as those of a line or of the environment do.

    An unknown key is an error, and field docstrings become the schema's descriptions.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


class Config(TextConfig):
    """A frozen section that comes from a document: no value is read as one of another kind than was written."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        names = [name for name, each in inspect.get_annotations(cls).items() if _is_field(each) and is_guessed(each)]
        if names:
            # Not on "*": the discriminator fields of a union may have no validator. A name of its own,
            # since a validator of the same name would take the place of the parent's.
            setattr(cls, f"_is_written_as_meant_in_{cls.__name__}", field_validator(*names, mode="before")(_check))


def _is_field(annotation: Any) -> bool:
    origin: object = get_origin(annotation)
    return origin is not ClassVar


def _check(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    assert info.field_name is not None
    check_exact(value, cls.model_fields[info.field_name].annotation)
    return value
