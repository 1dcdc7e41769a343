"""Pages for Prometheus, in version 0.0.4 of its text format.

A metric is made at the scrape, of what the process knows anyway: nothing is counted in a second place, and two
gateways in one process share no registry.
"""

import asyncio
from collections.abc import Iterable, Iterator

from fastapi import Response
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector


def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    """Make a gauge without samples, under our prefix; ``add_metric`` takes the labels' values in this order."""
    return GaugeMetricFamily(f"flotilla_{name}", meaning, labels=labels)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def page_of(families: Iterable[Metric]) -> str:
    """Write a page."""
    return generate_latest(_Families(families)).decode()


async def response_of(families: Iterable[Metric]) -> Response:
    """Answer a scrape. The metrics are made here, and written in a thread: 100 experiments are 4000 lines."""
    made = list(families)
    return Response(await asyncio.to_thread(page_of, made), media_type=CONTENT_TYPE_PLAIN_0_0_4)
