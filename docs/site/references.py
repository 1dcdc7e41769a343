"""References made of what the program says of itself: routes, commands and notebooks."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flotilla.cli.command_line import build_parser, leaves
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings

EVERYWHERE = {400, 401, 403, 405, 408, 413, 422, 429, 431, 503, 504}
"""Statuses that the page of REST explains once, for all routes."""


def rest_page() -> str:
    """List every public route: what it does, who may, what it takes, answers and refuses."""
    settings = GatewaySettings(token="none", redis_url="redis://nowhere", data=Path("/nowhere"))
    document = create_app(settings).openapi()
    kept: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation["tags"][0]
            if "internal" not in operation["tags"]:
                kept.setdefault(tag, []).extend(_route(f"{method.upper()} {path}", operation))
    lines = [
        "# Every route",
        "",
        "Made of the gateway's `/openapi.json` when this site is built. What holds for all routes (tokens, problems,",
        "limits), with an example of each kind of call: [REST](../rest.md).",
        "",
        "    curl http://127.0.0.1:8470/openapi.json",
    ]
    for tag, routes in kept.items():
        lines += ["", f"## {tag.capitalize()}", *routes]
    return "\n".join(lines) + "\n"


def _route(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"### `{title}`", "", _text(operation.get("description", operation.get("summary", ""))))
    facts = []
    if scopes := operation.get("x-scopes"):
        facts.append(f"scopes: {', '.join(scopes)}")
    for each in operation.get("parameters", []):
        need = "" if each.get("required") else ", may be left out"
        about = f": {_text(each['description'])}" if each.get("description") else ""
        facts.append(f"`{each['name']}` in the {each['in']}{need}{about}")
    if body := operation.get("requestBody"):
        facts.append(f"body: {_kinds(body['content'])}")
    for status, answer in sorted(operation["responses"].items()):
        if status.startswith("2"):
            facts.append(f"{status}: {_kinds(answer.get('content', {})) or 'no body'}")
        elif int(status) not in EVERYWHERE:
            facts.append(f"{status}: {_text(answer['description'])}")
    yield from ("", *(f"- {fact}" for fact in facts))


def _kinds(content: Mapping[str, Any]) -> str:
    """Name what a body holds, by the schemas' names."""
    found = []
    for kind, each in content.items():
        names = dict.fromkeys(re.findall(r"schemas/(\w+)", json.dumps(each)))
        found.append(" ".join([f"`{kind}`", " or ".join(names)]).strip())
    return ", ".join(found)


def _text(words: str) -> str:
    """Write a description on one line, in which nothing is read as HTML."""
    return " ".join(words.replace("``", "`").split()).replace("<", "&lt;")


def cli_page() -> str:
    """List every command with its arguments, as ``--help`` prints them."""
    lines = [
        "# Every command",
        "",
        "What `--help` says of each, written down when this site is built. By purpose, with examples:",
        "[the command line](../cli.md).",
        "",
        "    flotilla --help",
    ]
    for name, parser in leaves(build_parser()).items():
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
        lines += ["", f"## flotilla {name}", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def notebook_page(text: str, name: str) -> str:
    """Write a notebook as a page: its sentences and its code, without outputs."""
    lines: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        lines += [source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```", ""]
    title, _, rest = "\n".join(lines).partition("\n")
    return f"{title}\n\n[{name}]({name}) as a page.\n{rest}"
