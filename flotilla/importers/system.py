"""A system that launch files are imported from: its parameters, and the rules that look at several of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.importers.parameter import Parameter, ParameterTable
from flotilla.importers.source import Source

Rule = Callable[[Source], Mapping[str, Any]]
"""Makes spec fields, by dotted path, of several parameters."""
Finish = Callable[[Source, Mapping[str, Any]], dict[str, Any]]
"""Makes of all fields those that the spec has."""


@dataclass(frozen=True, slots=True)
class System(ParameterTable):
    """A system.

    Attributes:
        rules: what is made of several parameters, in this order; a later one may replace a field.
        finish: what is made of all fields in the end; None leaves them.
    """

    rules: tuple[Rule, ...]
    finish: Finish | None = None


def make_system(
    name: str,
    tables: Iterable[Iterable[Parameter]],
    rules: tuple[Rule, ...],
    spellings: Mapping[str, str] | None = None,
    finish: Finish | None = None,
) -> System:
    """Join the tables of a system.

    Raises:
        ValueError: a name stands in two rows, or a spelling leads nowhere.
    """
    parameters: dict[str, Parameter] = {}
    all_spellings = dict(spellings or {})
    for row in (row for table in tables for row in table):
        if row.name in parameters:
            raise ValueError(f"{name}: two rows are called {row.name}")
        parameters[row.name] = row
        all_spellings |= dict.fromkeys(row.aliases, row.name)
    for spelling, canonical in all_spellings.items():
        if canonical not in parameters or spelling in parameters:
            raise ValueError(f"{name}: the spelling {spelling} of {canonical} leads nowhere")
    return System(name, parameters, all_spellings, rules, finish)
