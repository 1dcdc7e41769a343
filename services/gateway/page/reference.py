"""``GET /docs``: ``/openapi.json`` as a page to read, without a script and without anything from another host.

Pages that send requests for their reader would be given tokens, and the usual ones load their program from elsewhere.

The gateway's own page is served beside it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from flotilla.services.gateway.page.files import add_page

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-cache"}
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; } code { background: #8882; padding: 0 .2rem; } details { margin: .4rem 0; }
table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""
Operation = tuple[str, str, Mapping[str, Any]]


def add_reference_page(app: FastAPI) -> None:
    """Serve the page; it is made when it is first asked for."""
    made: list[str] = []

    # No coroutine: the framework runs it on a thread, and the description takes a second to make.
    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def reference() -> HTMLResponse:
        """Show every route."""
        if not made:
            made.append(page_of(app.openapi()))
        return HTMLResponse(made[0], headers=HEADERS)


def page_of(document: Mapping[str, Any]) -> str:
    """Write the page of a description: one section for each tag, in the order of ``tags``."""
    by_tag: dict[str, list[Operation]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag[operation["tags"][0]].append((method.upper(), path, operation))
    title = escape(document["info"]["title"])
    lines = [f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"]
    lines += [f"<h1>{title}</h1><p>{escape(document['info'].get('description', ''))}</p>"]
    lines += ["<p>The same for programs, with the schemas of bodies: <a href='/openapi.json'>/openapi.json</a>.</p>"]
    for tag in document["tags"]:
        lines += [f"<h2>{escape(tag['name'])}</h2><p>{escape(tag.get('description', ''))}</p>"]
        lines += [line for operation in by_tag[tag["name"]] for line in _of_operation(*operation)]
    return "\n".join(lines)


def _of_operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    description = operation.get("description", "")
    yield f"<details><summary><code>{method} {escape(path)}</code> {escape(description.partition('. ')[0])}</summary>"
    yield f"<p>{escape(description)}</p>"
    if scopes := operation.get("x-scopes"):
        yield f"<p>Scopes: {escape(', '.join(scopes))}</p>"
    yield "<table>"
    for parameter in operation.get("parameters", ()):
        said = parameter.get("description") or parameter["schema"].get("description", "")
        yield _row(f"{parameter['name']} ({parameter['in']})", said)
    for media in operation.get("requestBody", {}).get("content", {}):
        yield _row("body", f"{media} {_name_of(operation['requestBody']['content'][media])}")
    for status, answer in sorted(operation["responses"].items()):
        yield _row(status, answer["description"])
    yield "</table></details>"


def _row(name: str, text: str) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"


def _name_of(content: Mapping[str, Any]) -> str:
    schema = content.get("schema", {})
    return str(schema.get("$ref", "").rpartition("/")[2] or schema.get("title", ""))


def add_pages(app: FastAPI) -> None:
    """Serve both; neither is part of the interface that is described."""
    add_page(app)
    add_reference_page(app)
