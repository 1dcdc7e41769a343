"""The child process that matches patterns and checks JSON against schemas.

It loads a kind, is asked ``{response, label, options}`` and answers ``{verdict, answer}`` or ``{error}``. A pattern can
take time without bound, so its owner kills this process when it takes too long.
"""

import json
import re
import resource
from collections.abc import Callable
from typing import Any

from flotilla.shared.children.serving import serve

MEMORY_BYTES = 1 << 30
LONGEST_ANSWER = 1000
FENCE = "```"


def match(response: str, label: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Match the response with the pattern of the options, else with the label."""
    pattern = str(label if options["pattern"] is None else options["pattern"])
    try:
        compiled = re.compile(pattern, re.IGNORECASE if options["ignore_case"] else 0)
    except re.error as error:
        return {"error": f"the label is not a regular expression: {error}"}
    found = compiled.fullmatch(response.strip()) if options["whole"] else compiled.search(response)
    if found is None:
        return {"verdict": False, "answer": None}
    answer = found.group(1) if compiled.groups else found.group()
    return {"verdict": True, "answer": None if answer is None else answer[:LONGEST_ANSWER]}


def check(response: str, label: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Check the response's JSON against the schema of the options, else of the label."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    where, schema = "json_schema", options["json_schema"]
    try:
        if schema is None:
            where, schema = "the label", json.loads(label or "")
        validator = validator_for(schema, default=Draft202012Validator)
        validator.check_schema(schema)
    except (ValueError, SchemaError) as error:
        return {"error": f"{where} is not a JSON schema: {getattr(error, 'message', error)}"[:500]}
    try:
        found = json.loads(json_part(response), parse_constant=refuse)
    except (ValueError, RecursionError):
        return {"verdict": False, "answer": None}
    # The registry holds nothing: a reference leads nowhere but into the schema itself, and above all not to a URL.
    is_valid = validator(schema, registry=Registry()).is_valid(found)
    return {"verdict": is_valid, "answer": json.dumps(found, sort_keys=True, ensure_ascii=False)[:LONGEST_ANSWER]}


def json_part(response: str) -> str:
    """Take what the last fenced block holds; the whole response where there is none."""
    parts = response.split(FENCE)
    if len(parts) < 3:
        return response
    first, newline, rest = parts[len(parts) - 3 + len(parts) % 2].partition("\n")
    return rest if first.strip().lower() == "json" else f"{first}{newline}{rest}"


def refuse(name: str) -> None:
    """Refuse NaN and the infinities, which Python reads and JSON does not have."""
    raise ValueError(name)


KINDS: dict[str, Callable[[str, str | None, dict[str, Any]], dict[str, Any]]] = {"regex": match, "json_schema": check}


class Texts:
    """Compares one sample at a time.

    Args:
        kind: of ``KINDS``.
    """

    about = None

    def __init__(self, kind: str) -> None:
        self._compare = KINDS[kind]
        if self._compare is check:
            import jsonschema  # noqa: F401  the slow import is over before the first time limit starts
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def handle(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Compare a sample's texts, as the options say."""
        try:
            return self._compare(asked["response"], asked["label"], asked["options"])
        except Exception as error:  # such as a nesting too deep: "could not tell"
            return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    serve(Texts)
