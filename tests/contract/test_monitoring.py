"""The dashboard and the alert rules name series and labels that are served, and values that a step reports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.services.gateway.monitoring.health.measurements import SHOWN_VALUES
from flotilla.services.gateway.prometheus import metrics_of
from flotilla.services.sandbox.metrics import SandboxMetrics
from flotilla.services.sandbox.routes.health import families_of
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.sandbox import RunStatus
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.telemetry.prometheus import page_of
from tests.prometheus import a_sandbox, parse_page
from tests.unit.gateway.builders import add_service
from tests.unit.gateway.test_prometheus import a_running_gateway

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
SELECTOR = re.compile(r"\b((?:flotilla|up)\w*)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
SCRAPERS_LABELS = {"job", "instance"}
BY_PROMETHEUS = {"up"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str, str]]:
    """Give each expression with its place, and what is written with its labels."""
    for rule in rules():
        annotations = " ".join(rule["annotations"].values())
        yield rule["alert"], rule["expr"], " ".join(re.findall(r"\$labels\.(\w+)", annotations))
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], " ".join(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))


async def pages() -> tuple[str, str]:
    """Scrape a gateway with all that it can have, and a sandbox."""
    gateway = await a_running_gateway()
    (experiment,) = gateway.repository
    gateway.feeder_status.of(experiment).ledger = Ledger(issued=4, outstanding=2)
    gateway.measurements.of(experiment).add_step(0.0, 1, dict.fromkeys(SHOWN_VALUES, 0.5) | {"lag/tokens/1": 4.0})
    await add_service(gateway, ServiceKind.REWARD, "reward", None)
    sandbox = SandboxMetrics()
    sandbox.count_run("python", RunStatus.SUCCESS, 0.25)
    return page_of(metrics_of(gateway)), page_of(families_of(a_sandbox(sandbox)))


@pytest.fixture
async def served() -> dict[str, set[str]]:
    """Give the labels of each series that is served."""
    labels: dict[str, set[str]] = {}
    for page in await pages():
        for name, given in parse_page(page):
            labels.setdefault(name, set()).update(label for label, _ in given)
    return labels


async def test_every_expression_names_what_is_served(served: dict[str, set[str]]) -> None:
    for place, expression, written in expressions():
        named = SELECTOR.findall(expression)
        assert named, f"{place} names no series: {expression}"
        known = set(SCRAPERS_LABELS)
        for name, matchers in named:
            assert name in served or name in BY_PROMETHEUS, f"{place}: {name} is not served"
            own = served.get(name, set()) | SCRAPERS_LABELS
            known |= own
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in own, f"{place}: {name} has no label {label}"
        for labels in GROUPING.findall(expression):
            assert set(labels.replace(" ", "").split(",")) <= known, f"{place}: by ({labels})"
        assert set(written.split()) <= known, f"{place} writes {written}"


def test_the_job_that_a_rule_names_is_the_gateways_under_a_configuration_and_under_an_operator() -> None:
    named = {job for _, expression, _ in expressions() for job in re.findall(r'\bjob="([^"]*)"', expression)}
    scraped = {each["job_name"] for each in yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]}
    monitors = yaml.safe_load_all((FOLDER.parent / "kubernetes/components/monitoring/monitors.yaml").read_text())
    operated = {
        rule["replacement"]
        for each in monitors
        for endpoint in each["spec"].get("endpoints", ())
        for rule in endpoint.get("relabelings", ())
        if rule["targetLabel"] == "job"
    }

    assert named == {"flotilla-gateway"}
    assert named <= scraped
    assert operated == named


async def test_only_counters_are_asked_for_their_rates() -> None:
    gauges = {name for page in await pages() for name in re.findall(r"^# TYPE (\w+) gauge$", page, re.MULTILINE)}

    assert "flotilla_experiments" in gauges
    for place, expression, _ in expressions():
        for name in re.findall(r"\b(?:rate|irate|increase|resets)\((\w+)", expression):
            assert name not in gauges, f"{place}: {name} may fall, which a rate takes for a counter that began again"


async def test_every_state_that_a_rule_names_is_served_before_anything_is_in_it() -> None:
    """A series that begins with what it warns of has not risen."""
    gateway, _ = await pages()
    states = {value for name, labels in parse_page(gateway) if name == "flotilla_experiments" for _, value in labels}

    assert states == set(ExperimentState)


async def test_every_value_that_is_chosen_by_name_is_reported_by_a_step_or_is_a_state() -> None:
    for place, expression, _ in expressions():
        for name in re.findall(r'\bname="([^"]*)"', expression):
            assert name in SHOWN_VALUES, f"{place}: {name}"
        for state in re.findall(r'\bstate="([^"]*)"', expression):
            assert state in set(ExperimentState), f"{place}: {state}"


def test_every_value_is_a_metric_that_is_documented() -> None:
    metrics = (FOLDER.parents[1] / "docs" / "metrics.md").read_text()

    assert [name for name in SHOWN_VALUES if f"`{name}`" not in metrics] == []


def test_panels_do_not_lie_over_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_every_alert_says_what_to_do_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
