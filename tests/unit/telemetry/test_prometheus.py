"""The pages of the services and of the sandbox, as a server reads them."""

import httpx
from fastapi import FastAPI

from flotilla.services.sandbox.metrics import SandboxMetrics
from flotilla.services.sandbox.routes.health import families_of
from flotilla.shared.net.server.serving import add_health_routes
from flotilla.shared.schemas.sandbox import RunStatus
from flotilla.shared.telemetry.prometheus import gauge, page_of
from tests.prometheus import a_sandbox, parse_page, value_of


async def test_a_services_load_is_a_page_of_gauges() -> None:
    app = FastAPI()
    load = {"busy_seconds": 2.5, "slots": 4.0}
    add_health_routes(app, why_not_ready=lambda _: None, gauges=lambda _: load)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.get("/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert parse_page(answer.text) == {
        ("flotilla_busy_seconds", frozenset()): 2.5,
        ("flotilla_slots", frozenset()): 4.0,
    }


def test_the_sandbox_counts_by_language_status_and_code() -> None:
    metrics = SandboxMetrics()
    metrics.count_run("python", RunStatus.SUCCESS, 0.25)
    metrics.count_run("python", RunStatus.SUCCESS, 0.5)
    metrics.count_refused("busy")

    series = parse_page(page_of(families_of(a_sandbox(metrics))))

    assert value_of(series, "flotilla_sandbox_runs_total", language="python", status="Success") == 2
    assert value_of(series, "flotilla_sandbox_refused_total", code="busy") == 1
    assert value_of(series, "flotilla_sandbox_run_seconds_total") == 0.75
    assert value_of(series, "flotilla_sandbox_running") == 1
    assert value_of(series, "flotilla_sandbox_waiting") == 2
    assert value_of(series, "flotilla_sandbox_isolation", level="C") == 1
    assert value_of(series, "flotilla_sandbox_slots_out_of_use") == 3
    assert value_of(series, "flotilla_sandbox_slots_spoiled_total") == 4
    assert value_of(series, "flotilla_sandbox_fork_servers_lost_total") == 5
    assert value_of(series, "flotilla_sandbox_sessions") == 6
    assert value_of(series, "flotilla_sandbox_fork_servers_ended_total") == 7
    assert value_of(series, "flotilla_sandbox_slots_backing_off") == 8
    assert len(series) == 12


def test_labels_are_escaped() -> None:
    family = gauge("odd", "Odd", "name")
    family.add_metric(('a"b\\c\nd',), 1)

    assert parse_page(page_of([family])) == {("flotilla_odd", frozenset({("name", 'a"b\\c\nd')})): 1.0}
