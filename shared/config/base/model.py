"""The base of all configuration: strict, frozen, described by its docstrings."""

import inspect
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from flotilla.shared.config.base.strict_types import check_exact, is_guessed
from flotilla.shared.schemas.described import Described

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
            # Not on "*": the fields that tell the variants of a union apart may have no validator. A name of its own,
            # since a validator of the same name would take the place of the parent's.
            setattr(cls, f"_is_written_as_meant_in_{cls.__name__}", field_validator(*names, mode="before")(_check))


def _is_field(annotation: Any) -> bool:
    origin: object = get_origin(annotation)
    return origin is not ClassVar


def _check(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    assert info.field_name is not None
    check_exact(value, cls.model_fields[info.field_name].annotation)
    return value
