"""A reader of pages for Prometheus: the client library's parser, and what the server refuses beyond it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from flotilla.services.sandbox.metrics import SandboxMetrics

TYPES = frozenset({"counter", "gauge", "histogram"})
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parse_page(text: str) -> Series:
    """Read a page: name and labels of each sample to its value.

    Raises:
        AssertionError: a metric is declared twice or not at all, or a sample is there twice.
        ValueError: it is not the text format.
    """
    assert text.endswith("\n")
    declared = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(declared) == len(set(declared)), "a metric is declared twice"
    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type in TYPES, f"{family.name} is {family.type}"
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, f"twice: {sample}"
            series[key] = sample.value
    return series


def value_of(series: Series, name: str, **labels: str) -> float | None:
    """Find a sample; None if the page has none."""
    return series.get((name, frozenset(labels.items())))


def a_sandbox(metrics: SandboxMetrics) -> Any:
    """Make as much of a service's state as its metrics are made of, with a number of its own for each."""
    pool = SimpleNamespace(num_running=1, num_waiting=2, num_out_of_use=1, usable=())
    sessions = SimpleNamespace(pool=SimpleNamespace(num_out_of_use=2, usable=()), num_living=6)
    runner = SimpleNamespace(
        num_spoiled=4,
        num_servers_lost=5,
        num_servers_ended=7,
        num_backing_off=lambda slots: 8,
        level="C",
        provider="local",
        families=tuple,
    )
    return SimpleNamespace(metrics=metrics, pool=pool, sessions=sessions, runner=runner)
