"""The tool: a calculator that adds and subtracts."""

import re


def calculator(expression: str) -> int:
    """Compute a sum such as 47+8-5."""
    if re.fullmatch(r"\d{1,9}([+-]\d{1,9}){0,20}", expression) is None:
        raise ValueError("this calculator adds and subtracts whole numbers, as in 47+8-5")
    return sum(map(int, re.findall(r"[+-]?\d+", expression)))
