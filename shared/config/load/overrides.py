"""Settings from outside a spec's file: ``key=value`` on a command line, and variables of the environment.

The file is weakest, then the environment, then the command line.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from flotilla.shared.config.load.yaml_text import read_value, too_large
from flotilla.shared.errors import InvalidSpec, Scalar

PREFIX = "FLOTILLA_SPEC__"
DEFAULT, FILE, COMMAND_LINE = "default", "file", "command line"


@dataclass(frozen=True, slots=True)
class Override:
    """A value that is set at a path, whole.

    Attributes:
        path: keys, and indexes of lists, from the root.
        value: read as YAML.
        origin: where it was given, for people.
        written: as it was given, for messages.
    """

    path: tuple[str, ...]
    value: Any
    origin: str
    written: str


def on_command_line(texts: Iterable[str]) -> list[Override]:
    """Read ``optimisation.steps=10``.

    Raises:
        InvalidSpec: one is not of the form KEY=VALUE.
    """
    found = []
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidSpec(f"override {text!r} is not of the form section.key=value")
        written = f"--set {key.strip()}"
        found.append(Override(tuple(key.strip().split(".")), _read(value, written), COMMAND_LINE, written))
    return found


def in_environment(environment: Mapping[str, str]) -> list[Override]:
    """Find ``FLOTILLA_SPEC__OPTIMISATION__STEPS=10``; those that set more come first, whatever their order.

    Raises:
        InvalidSpec: a name has an empty part.
    """
    found = []
    for name, value in environment.items():
        if not name.upper().startswith(PREFIX):
            continue
        path = tuple(name[len(PREFIX) :].lower().split("__"))
        if not all(path):
            raise InvalidSpec(f"{name} names no key: write {PREFIX}SECTION__KEY, with two underscores between names")
        found.append(Override(path, _read(value, name), f"environment variable {name}", name))
    return sorted(found, key=lambda override: (len(override.path), override.path))


def _read(text: str, written: str) -> Any:
    try:
        value = read_value(text)
    except yaml.YAMLError:
        return text
    except RecursionError:
        raise InvalidSpec(f"override {written}: brackets are nested too deeply") from None
    if (what := too_large(value)) is not None:
        raise InvalidSpec(f"override {written}: {what}")
    return value


def apply(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Set values in a copy of a document, one after the other.

    Raises:
        InvalidSpec: one reaches into something that is neither a section nor a list.
    """
    changed: dict[str, Any] = json.loads(json.dumps(document, default=str))
    for override in overrides:
        target: Any = changed
        for part, following in zip(override.path, (*override.path[1:], None), strict=True):
            key = _key(target, part, override)
            if following is None:
                target[key] = override.value
            else:
                if isinstance(target, dict) and target.get(key) is None:
                    target[key] = {}
                target = target[key]
    return changed


def _key(target: Any, part: str, override: Override) -> str | int:
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise InvalidSpec(f"override {override.written}: what stands above {part!r} is a value, not a section")
    if not part.isdigit() or int(part) >= len(target):
        raise InvalidSpec(
            f"override {override.written}: the list has {len(target)} items, and {part!r} is none of them"
        )
    return int(part)


def apply_overrides(document: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Set dotted keys, as in ``optimisation.steps=10``; values are read as YAML.

    Raises:
        InvalidSpec: an override is not of the form KEY=VALUE, or reaches into something that is no section.
    """
    return apply(document, on_command_line(texts))


def origin_of(path: Sequence[str], document: Mapping[str, Any], overrides: Sequence[Override]) -> str:
    """Return where the value at a path of the resolved spec comes from: the last that wrote it."""
    origin = FILE if _holds(document, path) else DEFAULT
    for override in overrides:
        size = len(override.path)
        if override.path[: len(path)] == tuple(path)[:size]:
            is_written = size >= len(path) or _holds(override.value, path[size:])
            origin = override.origin if is_written else DEFAULT
    return origin


def _holds(node: Any, path: Sequence[str]) -> bool:
    for part in path:
        if isinstance(node, Mapping):
            if part not in node:
                return False
            node = node[part]
        elif isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                return False
            node = node[int(part)]
        else:
            return False
    return True


def with_origins(error: InvalidSpec, overrides: Sequence[Override]) -> InvalidSpec:
    """Name the override that each entry of an error comes from, where it does not come from the file."""
    entries: list[dict[str, Scalar]] = []
    for entry in error.errors:
        path = tuple(str(entry["path"]).split("."))
        is_unknown = str(entry["allowed"]).startswith("unknown key")  # then whatever is below it made it
        shared = [
            each
            for each in overrides
            if path[: len(each.path)] == each.path or (is_unknown and each.path[: len(path)] == path)
        ]
        mark = f" (set by {shared[-1].written})" if shared else ""
        entries.append({**entry, "allowed": f"{entry['allowed']}{mark}"})
    if not entries:
        return error
    return InvalidSpec("; ".join(f"{each['path'] or 'spec'}: {each['allowed']}" for each in entries), errors=entries)
