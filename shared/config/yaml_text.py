"""Read and write YAML as people do: ``1e-5`` is a number, which YAML 1.1 takes for text."""

import re
from typing import Any

import yaml

FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
FLOAT_TAG = "tag:yaml.org,2002:float"
FIRST_CHARACTERS = list("-+.0123456789")


class ValueLoader(yaml.SafeLoader):
    """The safe loader, with floats as in YAML 1.2."""


ValueLoader.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_CHARACTERS)


class ValueDumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that ``ValueLoader`` would take for a number."""


ValueDumper.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_CHARACTERS)


class DocumentLoader(ValueLoader):
    """Refuses a key that stands twice, of which the later would win in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice: keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


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
