"""The parameters of one launch file, as the rules see them: what was given, else what the system takes by itself.

A system has parameters, and rules that look at several of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.importers.parameter import UNSET, Inherit, Parameter, ParameterTable
from flotilla.shared.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class Given:
    """A parameter that a launch file holds.

    Attributes:
        value: what was written.
        spelling: the name as it was written.
        where: file, override, script or command line.
        is_variable: whether other parameters refer to it.
        refusal: why it cannot be read at all; None where the tables say what becomes of it.
        lacks: variable of a script that leaves it without a value.
    """

    value: Any
    spelling: str
    where: str
    is_variable: bool = False
    refusal: str | None = None
    lacks: str | None = None

    @property
    def hint(self) -> str:
        """Say how to give the value that a script's variable does not have; nothing where it has one."""
        if self.lacks and self.lacks.isdigit():
            return f"; ${self.lacks} is an argument of the script, which has none here: write the value"
        return f"; {self.lacks} is empty in the script: give {self.lacks}=VALUE" if self.lacks else ""


class Source:
    """Gives values to rules, and remembers which were read, refused, or found missing.

    Args:
        system: whose parameters these are.
        given: by the name in the system's table.
        trees: values by the name as written, for each parameter that names below it belong to.
        rows: rows of the training data, where that is known.
    """

    def __init__(
        self,
        system: ParameterTable,
        given: Mapping[str, Given],
        trees: Mapping[str, Mapping[str, Any]],
        rows: int | None = None,
    ) -> None:
        self.system = system
        self.trees = trees
        self.given = given
        self.rows = rows
        self.read: set[str] = set()
        self.refusals: dict[str, str] = {}
        self.set_aside: dict[str, str] = {}
        self.missing: list[str] = []
        self.files: dict[str, str] = {}
        self.notes: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the launch file holds the parameter, be it with the system's default."""
        assert name in self.system.parameters, name
        if name in self.given:
            self.read.add(name)
        return name in self.given

    def value(self, name: str) -> Any:
        """Return a parameter's value, else the system's default; UNSET where it has none.

        Raises:
            InvalidSpec: the value is of the wrong type.
        """
        row = self.system.parameters[name]
        self.read.add(name)
        if name in self.given:
            given = self.given[name]
            try:
                return row.convert(given.spelling, given.value)
            except InvalidSpec as error:
                raise InvalidSpec(f"{error.detail}{given.hint}", errors=error.errors) from None
        if isinstance(row.default, Inherit):
            return self.value(row.default.name)
        return UNSET if row.default is UNSET else row.convert(name, row.default)

    def required(self, name: str) -> Any:
        """Return a value that must not be null.

        Raises:
            InvalidSpec: it is null.
        """
        value = self.value(name)
        if value is None or value is UNSET:
            hint = self.given[name].hint if name in self.given else ""
            raise InvalidSpec(
                f"{name}: must not be null{hint}", errors=[{"path": name, "value": None, "allowed": "a value"}]
            )
        return value

    def choose(self, name: str, choices: Mapping[str, Any]) -> Any:
        """Return what a value stands for; an unknown value is refused, and gives None."""
        value = self.value(name)
        found = choices.get(str(value), UNSET)
        if found is UNSET:
            self.refuse(name, f"{value!r} is not offered here: use {', '.join(sorted(choices))}")
            return None
        return found

    def refuse(self, name: str, why: str) -> None:
        """Refuse the value that a parameter has here, given or by default."""
        assert name in self.system.parameters, name
        self.refusals.setdefault(name, why)

    def refuse_written(self, spelling: str, why: str) -> None:
        """Refuse a parameter of a tree, by its name as written."""
        self.refusals.setdefault(spelling, why)

    def put_aside(self, spelling: str, why: str) -> None:
        """Call a parameter of a tree unsupported, by its name as written."""
        self.set_aside.setdefault(spelling, why)

    def note(self, what: str) -> None:
        """Add a line at the top of the report: what the spec as a whole is, and the file's was not."""
        if what not in self.notes:
            self.notes.append(what)

    def lack(self, what: str) -> None:
        """Return what must be known and is not."""
        if what not in self.missing:
            self.missing.append(what)


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
