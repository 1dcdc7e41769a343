"""What counts as a reward of another program: a finite number, never text or a boolean."""

import math
from decimal import Decimal
from numbers import Real
from typing import Annotated, Any

from pydantic import BeforeValidator

LONGEST_SHOWN = 100


def reward_number(value: Any) -> float:
    """Read a reward: an int or a float, also a scalar of numpy's or torch's.

    ``True`` and ``"1.0"`` are refused though ``float`` takes both: a program that answers them means something else, or
    is broken, and would be trained on all the same.

    Raises:
        ValueError: it is no number, or not finite; the message names the value and what is allowed.
    """
    if type(value) is float and math.isfinite(value):
        return value
    given = value
    if not isinstance(given, Real | Decimal) and callable(item := getattr(given, "item", None)):
        try:
            given = item()
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"a reward is one finite number, got {_named(value)}") from None
    if isinstance(given, bool) or not isinstance(given, Real | Decimal):
        raise ValueError(f"a reward is a finite number (int or float), got {_named(value)}")  # noqa: TRY004  pydantic reads ValueError
    try:
        number = float(given)
    except (OverflowError, ValueError):
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a reward is a finite number, got {str(value)[:LONGEST_SHOWN]}, which is not finite")
    return number


def _named(value: object) -> str:
    """Name a value by what the other program's author calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the bool {str(value).lower()}"
    if isinstance(value, str):
        return f"the string {value[:LONGEST_SHOWN]!r}"
    return f"a value of type {type(value).__name__}"


Reward = Annotated[float, BeforeValidator(reward_number)]
"""A field with a reward."""
