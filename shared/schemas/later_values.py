"""Values of enumerations that a later release has added: kept where they are only shown, refused where they decide.

A field whose value is shown, counted, or compared with those that the reader knows is annotated with ``shown``: an
unknown one is a member that is in no list and equal to none of the others. Where a reader has to do what a value says
the field is left as it is, and the whole message is refused.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar

from pydantic import BeforeValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

Kind = TypeVar("Kind", bound=StrEnum)
LONGEST: Final = 64


@lru_cache(maxsize=256)
def unknown(kind: type[Kind], value: str) -> Kind:
    """Make a member of this value, which ``kind`` does not list."""
    member = str.__new__(kind, value)
    member._name_, member._value_ = value.upper(), value
    return member


def shown(kind: type[StrEnum]) -> WrapValidator:
    """Keep a value that this release does not know, as a member that equals none of those that it knows."""

    def read(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        try:
            return known(value)
        except ValidationError:
            if isinstance(value, str) and len(value) <= LONGEST and value.isidentifier():
                return unknown(kind, str(value))
            raise

    return WrapValidator(read)


def known_alone(kind: type[StrEnum]) -> BeforeValidator:
    """Leave out of a list, or of a mapping's keys, what this release does not know and so has no use for."""
    values = frozenset(each.value for each in kind)

    def read(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: each for name, each in given.items() if name in values}
        if isinstance(given, list | tuple):
            return [each for each in given if not isinstance(each, str) or each in values]
        return given

    return BeforeValidator(read)
