"""The messages between services, and whether what one release writes is read by another."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flotilla.shared.schemas import experiment, held_out, publication, service
from flotilla.shared.schemas.task import TASK_SCHEMA
from flotilla.shared.schemas.trajectory import GROUP_SCHEMA
from flotilla.shared.streams.codec import EntryHeader

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
MESSAGES: tuple[type[BaseModel], ...] = (
    service.Registration,
    service.Registered,
    service.ObservedState,
    service.DesiredState,
    service.ServiceView,
    publication.PublicationRequest,
    publication.Publication,
    publication.PublicationReport,
    publication.Rendezvous,
    experiment.ExperimentView,
    experiment.MetricBatch,
    experiment.CheckpointView,
    held_out.HeldOutPage,
)
Schema = Mapping[str, Any]


def version() -> str:
    """Return the minor version of this checkout, such as 0.1."""
    full = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return ".".join(str(full).split(".")[:2])


def snapshot() -> dict[str, Any]:
    """Describe all messages of this checkout."""
    return {
        "messages": {model.__name__: _without_words(model.model_json_schema()) for model in MESSAGES},
        "streams": {
            "task": TASK_SCHEMA,
            "group": GROUP_SCHEMA,
            "header": sorted(field.name for field in fields(EntryHeader)),
        },
    }


def kept(release: str) -> dict[str, Any]:
    """Read what a release had."""
    found: dict[str, Any] = json.loads((FOLDER / f"{release}.json").read_text(encoding="utf-8"))
    return found


def releases() -> list[str]:
    """List the releases that are kept, oldest first."""
    return sorted(
        (path.stem for path in FOLDER.glob("*.json")), key=lambda name: [int(part) for part in name.split(".")]
    )


def _without_words(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: {name: _without_words(each) for name, each in value.items()}
            if key in {"properties", "$defs"}
            else _without_words(value)
            for key, value in node.items()
            if key not in {"description", "title", "default", "examples"}
        }
    return [_without_words(each) for each in node] if isinstance(node, list) else node


def problems(written: Schema, read: Schema) -> Iterator[str]:
    """List why a reader would refuse what a writer sends; writers send every field that they know.

    Args:
        written: schema of the message in the writer's release.
        read: in the reader's.
    """
    yield from _problems(written, read, written.get("$defs", {}), read.get("$defs", {}), "", frozenset())


def _problems(
    written: Schema, read: Schema, old: Schema, new: Schema, where: str, seen: frozenset[str]
) -> Iterator[str]:
    if "$ref" in written and "$ref" in read:
        name = f"{written['$ref']} {read['$ref']}"
        if name in seen:
            return
        seen |= {name}
    written, read = _resolved(written, old), _resolved(read, new)
    sent, known = written.get("properties", {}), read.get("properties", {})
    for name in sorted(set(read.get("required", ())) - set(sent)):
        yield f"{where}.{name} is required and not sent"
    if known and read.get("additionalProperties") is False:
        for name in sorted(set(sent) - set(known)):
            yield f"{where}.{name} is sent and refused as unknown"
    for name in sorted(set(sent) & set(known)):
        yield from _problems(sent[name], known[name], old, new, f"{where}.{name}", seen)
    if "enum" in written and "enum" in read and (lost := set(written["enum"]) - set(read["enum"])):
        yield f"{where} may be {', '.join(sorted(map(str, lost)))}, which is refused"
    kinds, taken = _kinds(written, old), _kinds(read, new)
    if taken and kinds - taken - ({"integer"} if "number" in taken else set()):
        yield f"{where} may be {', '.join(sorted(kinds - taken))}, and {', '.join(sorted(taken))} is read"
    for part in ("items", "additionalProperties"):
        if isinstance(written.get(part), dict) and isinstance(read.get(part), dict):
            yield from _problems(written[part], read[part], old, new, f"{where}[]", seen)
    for choice in _objects(written, old):
        for other in _objects(read, new):
            if written is not choice and set(choice.get("properties", {})) & set(other.get("properties", {})):
                yield from _problems(choice, other, old, new, where, seen)


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def _choices(schema: Schema, definitions: Schema) -> list[Schema]:
    several = schema.get("anyOf") or schema.get("oneOf")
    return [_resolved(each, definitions) for each in several] if several else []


def _objects(schema: Schema, definitions: Schema) -> list[Schema]:
    return [each for each in _choices(schema, definitions) if "properties" in each]


def _kinds(schema: Schema, definitions: Schema) -> set[str]:
    found = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    for each in _choices(schema, definitions):
        found |= _kinds(each, definitions)
    return found
