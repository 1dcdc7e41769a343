"""Write the gateway's description of its interface, of which the page's types are made: ``make page`` runs it.

Only what the page reads is kept: the schema of specs is most of the document, and the page takes any spec.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings


def references(node: Any) -> set[str]:
    """Find the names of the schemas that a part of the document refers to."""
    if isinstance(node, dict):
        own = {str(node["$ref"]).rpartition("/")[2]} if "$ref" in node else set()
        return own.union(*(references(each) for each in node.values()))
    return set().union(*(references(each) for each in node)) if isinstance(node, list) else set()


def main() -> None:
    """Write the schemas of all that is answered, and of the bodies that are no specs."""
    settings = GatewaySettings(token="none", redis_url="redis://nowhere", data=Path("/nowhere"))
    document = create_app(settings).openapi()
    schemas = document["components"]["schemas"]
    wanted: set[str] = set()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "internal" not in operation["tags"]:
                wanted |= references(operation["responses"])
                wanted |= references(operation.get("requestBody", {})) if path.endswith(("fork", "extend")) else set()
    found: set[str] = set()
    while wanted - found:
        name = min(wanted - found)
        found.add(name)
        wanted |= references(schemas[name])
    kept = {name: schemas[name] for name in sorted(found)}
    json.dump(
        {"openapi": document["openapi"], "info": document["info"], "paths": {}, "components": {"schemas": kept}},
        sys.stdout,
    )


if __name__ == "__main__":
    main()
