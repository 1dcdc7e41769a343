"""Read and write YAML as people do: ``1e-5`` is a number, which YAML 1.1 takes for text."""

import re
from typing import Any

import yaml

FLOAT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
MERGE_TAG = "tag:yaml.org,2002:merge"
FLOAT_TAG = "tag:yaml.org,2002:float"
TEXT_TAGS = frozenset({"tag:yaml.org,2002:str", MERGE_TAG})
MAX_SHOWN = 80
MAX_DEPTH = 40
MAX_VALUES = 20_000
MAX_MERGES = 100
"""Most mappings that one ``<<`` merges, and times a hundred most keys that come of it: each level could double them."""
FIRST_CHARACTERS = list("-+.0123456789")


class ValueLoader(yaml.SafeLoader):
    """The safe loader, with floats as in YAML 1.2; what cannot be read is always a ``YAMLError`` with its place."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == MERGE_TAG and isinstance(value, yaml.SequenceNode) and len(value.value) > MAX_MERGES:
                problem = f"one << merges {MAX_MERGES} mappings at most"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGES * 100:
            problem = f"<< makes more than {MAX_MERGES * 100} keys"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
            # A date that does not exist, ``!!timestamp`` before what is none, a number of thousands of digits, ...
            kind, written = node.tag.rpartition(":")[2], str(node.value)
            shown = written if len(written) <= MAX_SHOWN else f"{written[:MAX_SHOWN]}…"
            problem = f"{shown!r} cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


ValueLoader.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_CHARACTERS)


class ValueDumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that ``ValueLoader`` would take for a number."""


ValueDumper.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_CHARACTERS)


class DocumentLoader(ValueLoader):
    """Refuses a key that is no text, and one that stands twice, of which the later would win in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        self.name_keys(node)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag not in TEXT_TAGS:
                problem = f"the key {key.value!r} is no text: put it between quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice: keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node

    def name_keys(self, node: yaml.MappingNode) -> None:
        """Make text of keys that are none, where that is allowed."""


def too_large(document: Any) -> str | None:
    """Return what is too much about a document, if anything is: anchors let a few lines mean any number of values."""
    level, count = [document], 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += _values(each)
            # Not after the whole level: aliases of a list of thousands, thousands of times, would fill the memory.
            if count + len(below) > MAX_VALUES:
                return f"a document has {MAX_VALUES} values at most"
        count += len(below)
        level = below
        if not level:
            return None
    return f"values stand {MAX_DEPTH} deep in each other at most"


def _values(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def read_value(text: str) -> Any:
    """Read one value, such as the right side of ``optimisation.learning_rate=1e-5``.

    Raises:
        yaml.YAMLError: it does not parse.
    """
    return yaml.load(text, Loader=ValueLoader)  # noqa: S506 - a safe loader


def write_value(value: Any, *, flow: bool = False, width: int = 110) -> str:
    """Write plain values so that ``read_value`` gives the same again.

    Args:
        flow: in one line, with brackets.
        width: of a line.
    """
    text: str = yaml.dump(
        value, Dumper=ValueDumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=width
    )
    return text
