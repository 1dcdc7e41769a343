"""What becomes of one parameter of another system: a row of a table, and a table of rows.

No row reads a file or knows of another row: what depends on several parameters is a rule of the system.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final

from flotilla.importers.values import Convert, unchanged


class Unset(Enum):
    """The absence of a value, where null is one."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class Verdict(StrEnum):
    """What becomes of a parameter."""

    APPLIED = "applied"
    """The spec has the same setting, and takes the value as it is."""
    TRANSLATED = "translated"
    """It becomes a setting of another form, alone or with others."""
    IGNORED = "ignored"
    """It has no meaning here, or asks for nothing."""
    UNSUPPORTED = "unsupported"
    """It asks for a way to run that the fleet does not have; what is computed is the same."""
    REFUSED = "refused"
    """The fleet does not do it."""


@dataclass(frozen=True, slots=True)
class Inherit:
    """A default that is another parameter's value."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of another system.

    Attributes:
        name: as the system's users write it.
        verdict: what becomes of it.
        reason: one line: what it becomes; why it cannot matter; or why it is refused, and what to do instead.
        targets: the spec fields that it sets, dotted.
        default: the system's; UNSET where silence leaves our default in place.
        convert: reads its value.
        translate: makes the value of its only target; None where a rule does.
        example: a value other than the default that changes every target.
        context: further parameters under which the example shows.
        harmless: values of a refused or unsupported parameter that ask for nothing, besides the default.
        unread: the verdict where the other parameters leave it without effect.
        is_judged: whether a rule alone says when a refused parameter asks for something.
        is_tree: whether names below it (``name.anything``) belong to it.
        is_secret: whether its value must never be shown.
        aliases: other spellings.
    """

    name: str
    verdict: Verdict
    reason: str
    targets: tuple[str, ...] = ()
    default: Any = UNSET
    convert: Convert = unchanged
    translate: Callable[[Any], Any] | None = None
    example: Any = UNSET
    context: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()
    unread: Verdict = Verdict.IGNORED
    is_judged: bool = False
    is_tree: bool = False
    is_secret: bool = False
    aliases: tuple[str, ...] = ()


def applied(
    name: str, target: str, convert: Convert, reason: str, *, example: Any, default: Any = UNSET, **more: Any
) -> Parameter:
    """Make a row whose value is taken as it is; with ``context`` a rule decides whether."""
    translate = None if "context" in more else (lambda value: value)
    return Parameter(
        name=name,
        verdict=Verdict.APPLIED,
        reason=reason,
        targets=(target,),
        convert=convert,
        default=default,
        example=example,
        translate=translate,
        **more,
    )


def translated(
    name: str,
    targets: str | tuple[str, ...],
    convert: Convert,
    reason: str,
    *,
    example: Any,
    default: Any = UNSET,
    **more: Any,
) -> Parameter:
    """Make a row whose value takes another form, by ``translate`` or by a rule."""
    return Parameter(
        name=name,
        verdict=Verdict.TRANSLATED,
        reason=reason,
        targets=(targets,) if isinstance(targets, str) else targets,
        convert=convert,
        default=default,
        example=example,
        **more,
    )


def ignored(reason: str, *names: str, is_tree: bool = False, is_secret: bool = False) -> tuple[Parameter, ...]:
    """Make rows that have no meaning here, for one and the same reason."""
    return tuple(
        Parameter(name=name, verdict=Verdict.IGNORED, reason=reason, is_tree=is_tree, is_secret=is_secret)
        for name in names
    )


NOTHING: Final[tuple[Any, ...]] = (None, False, {}, [])
"""Values that ask for nothing, of whatever could be asked for."""


def unsupported(
    reason: str,
    *names: str,
    is_tree: bool = False,
    default: Any = UNSET,
    harmless: tuple[Any, ...] = (),
    nothing: tuple[Any, ...] = NOTHING,
) -> tuple[Parameter, ...]:
    """Make rows that ask for a way to run, unless their value is the default, harmless, or nothing at all."""
    return tuple(
        Parameter(
            name=name,
            verdict=Verdict.UNSUPPORTED,
            reason=reason,
            is_tree=is_tree,
            default=default,
            harmless=(*nothing, *harmless),
        )
        for name in names
    )


def refused(name: str, reason: str, *, default: Any = UNSET, harmless: tuple[Any, ...] = (), **more: Any) -> Parameter:
    """Make a row that is refused unless its value is the default or harmless."""
    return Parameter(name=name, verdict=Verdict.REFUSED, reason=reason, default=default, harmless=harmless, **more)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of a system.

    Attributes:
        name: the system's.
        parameters: every one that is known, by name.
        spellings: other names of a parameter, with the name in ``parameters``.
    """

    name: str
    parameters: Mapping[str, Parameter]
    spellings: Mapping[str, str]

    def find(self, name: str) -> Parameter | None:
        """Find the parameter that a written name belongs to."""
        canonical = self.spellings.get(name, name)
        last = canonical.rpartition(".")[2]
        # Markers such as _target_ stand in any section.
        found = self.parameters.get(last if last.startswith("_") else canonical)
        while found is None and "." in canonical:
            canonical = canonical.rpartition(".")[0]
            above = self.parameters.get(self.spellings.get(canonical, canonical))
            found = above if above is not None and above.is_tree else None
        return found

    def is_section(self, name: str) -> bool:
        """Whether a name begins as parameters of the system do: then a typing error is likelier than a variable."""
        first, dot, _ = name.partition(".")
        return bool(dot) and any(each.startswith(f"{first}.") for each in self.parameters)
