"""Read YAML as Hydra does: nested keys as dotted names, ``key=value`` overrides, ``${...}`` interpolations."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any

import yaml

from flotilla.importers.parameter import UNSET
from flotilla.importers.source import Given
from flotilla.importers.values import shown
from flotilla.shared.config.load.spec_text import parse_document
from flotilla.shared.config.load.yaml_text import MAX_VALUES, DocumentLoader, read_value, too_large
from flotilla.shared.config.redaction import may_be_secret
from flotilla.shared.errors import InvalidSpec

OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w.\-/@*]*)(?:=(.*))?$", re.DOTALL)
NOT_READ = "\0"
"""Stands in an environment for the value of a variable that may be a secret."""
MAX_DEPTH = 40
MAX_TEXT = 100_000

Lookup = Callable[[str], Any]
"""Gives the default of a name that the file does not hold, or UNSET."""


class LaunchLoader(DocumentLoader):
    """Takes whole numbers as keys, which Hydra does, as the text that they are written as."""

    def name_keys(self, node: yaml.MappingNode) -> None:
        """Make text of whole numbers."""
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:int":
                key.tag = "tag:yaml.org,2002:str"


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Hide the values of variables that may be secrets."""
    return {name: NOT_READ if may_be_secret(name, value) else value for name, value in environment.items()}


def problem(path: str, value: Any, allowed: str) -> InvalidSpec:
    """Describe what is wrong at a place of the file."""
    entry = {"path": path, "value": shown(value), "allowed": allowed}
    return InvalidSpec(f"{path}: {allowed}, got {shown(value).strip()}", errors=[entry])


def read_yaml(text: str, *, source: str) -> dict[str, Any]:
    """Read a YAML mapping into dotted names.

    Raises:
        InvalidSpec: it does not parse, is no mapping, or has a key that is not text.
    """
    try:
        document = parse_document(text, source=source, loader=LaunchLoader)
    except InvalidSpec as error:
        raise InvalidSpec(error.detail, errors=[{"path": source, "value": None, "allowed": error.detail}]) from None
    found: dict[str, Any] = {}
    _flatten(document, "", found)
    return found


def _check_size(path: str, node: Any) -> None:
    if (what := too_large(node)) is not None:
        raise problem(path, "…", what)


def _flatten(node: Mapping[Any, Any], prefix: str, found: dict[str, Any]) -> None:
    for key, value in node.items():
        if not isinstance(key, str):
            raise problem(f"{prefix}{key}", key, "a key must be text")
        if isinstance(value, Mapping) and value:
            _flatten(value, f"{prefix}{key}.", found)
        else:
            found[f"{prefix}{key}"] = value


def apply_hydra_overrides(flat: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Apply ``key=value``, ``+key=value``, ``++key=value`` and ``~key``.

    Returns:
        The dotted names with their values, and the names that an override set.

    Raises:
        InvalidSpec: an override has none of these forms.
    """
    changed, touched = dict(flat), set()
    for override in overrides:
        match = OVERRIDE.match(override.strip())
        if match is None or (match[3] is None and match[1] != "~"):
            raise problem(shown(override), override, "an override has the form key=value, +key=value or ~key")
        sign, name, written = match.groups()
        name = name.replace("/", ".")
        for old in [each for each in changed if each == name or each.startswith(f"{name}.")]:
            del changed[old]
        if sign == "~":
            continue
        value = parse_value(name, written)
        if isinstance(value, Mapping) and value:
            below: dict[str, Any] = {}
            _flatten(value, f"{name}.", below)
            changed |= below
            touched |= set(below)
        else:
            changed[name] = value
            touched.add(name)
    return changed, touched


def _why_unset(resolver: str) -> str:
    return "is not set, or may be a secret, which is not read" if resolver == "oc.env" else "is not set"


def parse_value(name: str, written: str) -> Any:
    """Read the right side of an override: YAML, with text where that fails."""
    if "${" in written and not written.strip().startswith(("[", "{")):
        return written
    try:
        value = read_value(written)
    except yaml.YAMLError:
        return written
    except RecursionError:
        raise problem(name, written, "brackets may not stand in each other without end") from None
    _check_size(name, value)
    return value


class Interpolation:
    """Resolves ``${...}``: other keys, ``oc.env``, ``oc.select``, ``now`` (a date, by a format of strftime's).

    Args:
        flat: the dotted names.
        default: gives what the file does not hold.
        environment: for ``oc.env``.

    Attributes:
        used: the names that others refer to.
    """

    def __init__(self, flat: Mapping[str, Any], default: Lookup, environment: Mapping[str, str]) -> None:
        self._flat = flat
        self._default = default
        self._environment = environment
        self._resolved = 0
        self.used: set[str] = set()

    def resolve(self, name: str) -> Any:
        """Resolve the value of one name.

        Raises:
            InvalidSpec: it refers to what is not there, or to itself; ``errors`` has the name.
        """
        return self._value(name, self._flat[name], ())

    def _value(self, path: str, value: Any, trail: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self._value(path, item, trail) for item in value]
        if isinstance(value, Mapping):
            return {key: self._value(path, item, trail) for key, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        return self._text(path, value, trail)

    def _text(self, path: str, written: str, trail: tuple[str, ...]) -> Any:
        parts: list[Any] = []
        position = 0
        while (start := written.find("${", position)) >= 0:
            end = _closing(path, written, start)
            parts += [written[position:start]] if start > position else []
            parts.append(self._reference(path, written[start + 2 : end], trail))
            position = end + 1
        parts += [written[position:]] if position < len(written) else []
        if len(parts) == 1:
            return parts[0]
        joined = "".join("" if part is None else str(part) for part in parts)
        if len(joined) > MAX_TEXT:
            raise problem(path, written, f"text of at most {MAX_TEXT} letters")
        return joined

    def _reference(self, path: str, inner: str, trail: tuple[str, ...]) -> Any:
        inner = str(self._text(path, inner, trail)).strip() if "${" in inner else inner.strip()
        self._resolved += 1
        if self._resolved > MAX_VALUES:
            raise problem(path, f"${{{inner}}}", f"a file has at most {MAX_VALUES} interpolations, repeated ones too")
        if inner in trail or len(trail) > MAX_DEPTH:
            raise problem(path, f"${{{inner}}}", "an interpolation must not lead back to itself")
        resolver, colon, argument = inner.partition(":")
        if colon:
            return self._resolver(path, resolver, argument, trail)
        found = self._look_up(path, inner, trail)
        if found is UNSET:
            raise problem(path, f"${{{inner}}}", f"nothing is called {inner}: give it as {inner}=VALUE")
        return found

    def _look_up(self, path: str, name: str, trail: tuple[str, ...]) -> Any:
        name = _absolute(path, name)
        self.used.add(name)
        if name in self._flat:
            return self._value(name, self._flat[name], (*trail, name))
        below = [each for each in self._flat if each.startswith(f"{name}.")]
        if below:
            found: dict[str, Any] = {}
            for each in below:
                *parents, last = each.removeprefix(f"{name}.").split(".")
                section = found
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[last] = self._value(each, self._flat[each], (*trail, name))
            return found
        return self._value(name, self._default(name), (*trail, name))

    def _resolver(self, path: str, resolver: str, argument: str, trail: tuple[str, ...]) -> Any:
        name, comma, default = argument.partition(",")
        name = name.strip().strip("'\"")
        if resolver == "oc.env":
            found: Any = self._environment.get(name, UNSET)
            found = UNSET if found == NOT_READ else found
        elif resolver == "oc.select":
            found = self._look_up(path, name, trail)
        elif resolver == "now":
            return datetime.now().astimezone().strftime(argument)
        else:
            raise problem(
                path, f"${{{resolver}:…}}", "only oc.env, oc.select and now are resolved here: write the value"
            )
        if found is not UNSET:
            return found
        if not comma:
            raise problem(
                path, f"${{{resolver}:{argument}}}", f"{name} {_why_unset(resolver)}, and there is no default"
            )
        return parse_value(path, default.strip())


def _absolute(path: str, name: str) -> str:
    """Make a name that starts with dots relative to the section that holds ``path``."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    parents = path.split(".")[:-dots]
    return ".".join([*parents, name[dots:]])


def _closing(path: str, written: str, start: int) -> int:
    depth = 0
    for position in range(start, len(written)):
        if written[position] == "{":  # of an interpolation, or of a mapping that is its default
            depth += 1
        elif written[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    raise problem(path, written, "an interpolation ${ needs its }")


def as_given(
    flat: Mapping[str, Any], touched: set[str], default: Lookup, environment: Mapping[str, str]
) -> list[Given]:
    """Resolve all interpolations; a parameter whose variable is not set is refused, where its value matters.

    Raises:
        InvalidSpec: one cannot be resolved.
    """
    interpolation = Interpolation(flat, default, environment)
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, written in flat.items():
        try:
            values[name] = interpolation.resolve(name)
        except InvalidSpec as error:
            if "${oc.env:" not in str(written):
                raise
            values[name], unknown[name] = written, error.detail
    return [
        Given(value, name, "override" if name in touched else "file", _is_used(name, interpolation.used),
              unknown.get(name))
        for name, value in values.items()
    ]  # fmt: skip


def _is_used(name: str, used: Container[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in used for end in range(1, len(parts) + 1))
