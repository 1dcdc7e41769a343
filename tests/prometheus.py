"""A reader of Prometheus' text format, as strict as the server's: a metric is declared once, and before its samples."""

import re
from collections.abc import Mapping

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (-?[0-9.]+(?:e[+-]?\d+)?|NaN|[+-]Inf)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(?:,|$)')
TYPES = frozenset({"counter", "gauge", "histogram"})
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parse_page(text: str) -> Series:
    """Read a page: name and labels of each sample to its value.

    Raises:
        AssertionError: the server would refuse the page, or take it for something else.
    """
    assert text.endswith("\n")
    types: dict[str, str] = {}
    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert kind in TYPES and current not in types, line
            types[current] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found, line
            name, inside, value = found.groups()
            labels = LABEL.findall(inside or "")
            assert "".join(f'{key}="{label}",' for key, label in labels).rstrip(",") == (inside or ""), line
            suffix = name.removeprefix(current)
            assert suffix in (("_bucket", "_sum", "_count") if types[current] == "histogram" else ("",)), line
            assert types[current] != "counter" or name.endswith("_total"), line
            key = (name, frozenset(labels))
            assert key not in series, f"twice: {line}"
            series[key] = float(value)
    return series


def value_of(series: Series, name: str, **labels: str) -> float | None:
    """Find a sample; None if the page has none."""
    return series.get((name, frozenset(labels.items())))
