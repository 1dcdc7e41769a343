"""Services of two neighbouring releases talk: what one writes the other reads, both ways."""

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.routes.publications import FailedReport, SentReport
from flotilla.shared.schemas.episode import EndedEpisode, OpenedEpisode
from flotilla.shared.schemas.samples import SamplePage
from flotilla.shared.schemas.service import (
    DesiredState,
    ObservedState,
    Registration,
    ServiceKind,
    ServiceView,
    WorkState,
)
from tests.contract.releases.messages import MESSAGES, kept, problems, releases, snapshot, version
from tests.unit.cli.test_progress import a_view
from tests.unit.gateway.builders import a_manifest

PREVIOUS = releases()[-2:]
"""The release before this one, and this one as it began; of 0.1 there is only itself."""
NOW = snapshot()


@pytest.mark.parametrize("release", PREVIOUS)
@pytest.mark.parametrize("name", [model.__name__ for model in MESSAGES])
def test_what_a_release_writes_is_read_by_the_next_and_the_other_way_round(release: str, name: str) -> None:
    then, now = kept(release)["messages"][name], NOW["messages"][name]

    assert list(problems(then, now)) == [], f"{release} writes, this one reads"
    assert list(problems(now, then)) == [], f"this one writes, {release} reads"


@pytest.mark.parametrize("release", PREVIOUS)
def test_entries_of_streams_outlive_an_upgrade(release: str) -> None:
    then = kept(release)["streams"]

    assert (then["task"], then["group"]) == (NOW["streams"]["task"], NOW["streams"]["group"]), (
        "a reader refuses a payload of another schema: keep reading the one before"
    )
    assert set(then["header"]) <= set(NOW["streams"]["header"])


def test_this_release_has_its_messages_written_down() -> None:
    assert version() in releases(), "python -m tests.contract.releases"


def changed(change: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a message, and the same after a change that an upgrade does not survive."""
    before = copy.deepcopy(NOW["messages"]["Registration"])
    after = copy.deepcopy(before)
    match change:
        case "field removed":
            del after["properties"]["address"]
        case "field required":
            after["properties"]["rack"] = {"type": "string"}
            after["required"].append("rack")
        case "choice removed":
            after["$defs"]["ServiceKind"]["enum"].remove("sandbox")
        case "type changed":
            after["properties"]["pid"]["type"] = "string"
        case "field renamed below":
            devices = after["$defs"]["Capabilities"]
            devices["properties"]["gpus"] = devices["properties"].pop("devices")
            devices["required"] = [*devices.get("required", []), "gpus"]
    return before, after


@pytest.mark.parametrize(
    "change", ["field removed", "field required", "choice removed", "type changed", "field renamed below"]
)
def test_the_check_finds_a_change_that_breaks_an_upgrade(change: str) -> None:
    before, after = changed(change)

    assert [*problems(before, after), *problems(after, before)] != []


def test_a_new_field_with_a_default_breaks_nothing() -> None:
    before = NOW["messages"]["Registration"]
    after = copy.deepcopy(before)
    after["properties"]["rack"] = {"type": "string"}

    assert [*problems(before, after), *problems(after, before)] == []


@pytest.mark.parametrize("model", [Registration, ObservedState, DesiredState])
def test_a_field_of_a_later_release_is_passed_over(model: Any) -> None:
    given = {"later": {"of": 1}}
    if model is Registration:
        given |= {
            "kind": ServiceKind.ROLLOUT,
            "address": "http://10.0.0.7:9002",
            "host": "h",
            "pid": 1,
            "incarnation": "a",
        }
    if model is DesiredState:
        given |= {"state": "idle", "tag": "t"}

    assert not hasattr(model.model_validate(given), "later")


@pytest.mark.parametrize("model", [*MESSAGES, OpenedEpisode, EndedEpisode, SamplePage, SentReport, FailedReport])
def test_no_message_between_programs_refuses_unknown_fields(model: Any) -> None:
    schema = model.model_json_schema()

    refusing = [name for name, each in schema.get("$defs", {}).items() if each.get("additionalProperties") is False]
    assert refusing == [] and schema.get("additionalProperties") is not False


LATER = "of_a_later_release"
SHOWN = {
    ("Registration", "EngineCapability"),
    ("Registered", "ServiceKind"),
    ("ObservedState", "ReceiveState"),
    ("ObservedState", "WorkState"),
    ("ServiceView", "EngineCapability"),
    ("ServiceView", "ReceiveState"),
    ("ServiceView", "ServiceKind"),
    ("ServiceView", "WorkState"),
    ("ExperimentView", "Effect"),
    ("ExperimentView", "ExperimentKind"),
    ("ExperimentView", "ExperimentState"),
}
"""Enumerations of which a reader shows a value, counts it, or has no use for one that it does not know."""
DECIDING = {
    ("Registration", "ServiceKind"): "a gateway cannot place a service of a kind that it does not know",
    ("DesiredState", "WorkState"): "a service must not do something else than it is told",
    ("DesiredState", "PublicationPhase"): "nor switch weights too early, or never",
    ("DesiredState", "Transport"): "nor wait for bytes that come another way",
    ("Publication", "PublicationPhase"): "a trainer must not take a version for committed that is not",
    ("Publication", "Transport"): "nor send nothing to a member that waits",
    ("PublicationReport", "ReceiveState"): "by itself it is dropped by who reads the state around it",
}
"""Enumerations of which a reader does what a value says: an unknown one is refused."""
EXAMPLES: dict[str, Any] = {
    "Registration": {
        "kind": "rollout",
        "address": "http://10.0.0.7:9002",
        "host": "h",
        "pid": 1,
        "incarnation": "a",
        "capabilities": {"engines": [{"kind": "embedded", "capabilities": ["sleep"]}]},
    },
    "Registered": {"service_id": "r", "lease_seconds": 5, "peers": {"sandbox": "t"}},
    "ObservedState": {"state": "running", "publication": {"version": 1, "epoch": 1, "state": "joined"}},
    "DesiredState": {
        "tag": "t",
        "state": "running",
        "publication": {
            "version": 1,
            "epoch": 1,
            "transport": "gloo",
            "rank": 1,
            "phase": "preparing",
            "rendezvous": None,
            "deadline_seconds": 5,
            "manifest": a_manifest().model_dump(mode="json"),
        },
    },
    "Publication": {
        "experiment_id": "e",
        "version": 1,
        "epoch": 1,
        "phase": "committed",
        "members": [{"service_id": "r", "rank": 1, "transport": "gloo"}],
        "deadline_seconds": 5,
    },
    "PublicationReport": {"version": 1, "epoch": 1, "state": "joined"},
}
EXAMPLES["ServiceView"] = {
    "service_id": "r",
    **EXAMPLES["Registration"],
    "registered_at": "2026-01-01T00:00:00Z",
    "lease_expires_in_seconds": 5,
    "is_draining": False,
    "observed": EXAMPLES["ObservedState"],
}
EXAMPLES["ExperimentView"] = a_view(
    changes=[{"id": "c", "at": "a", "actor": "operator", "effect": "trainer", "keys": [{"path": "a.b"}]}],
).model_dump(mode="json")
VALUES = {"ServiceKind": "rollout sandbox", "WorkState": "running", "ReceiveState": "joined", "Effect": "trainer"}
VALUES |= {"PublicationPhase": "committed preparing", "Transport": "gloo", "EngineCapability": "sleep"}
VALUES |= {"ExperimentState": "running"}


def enumerations(model: Any) -> set[str]:
    """List the enumerations of a message."""
    return {name for name, each in model.model_json_schema().get("$defs", {}).items() if "enum" in each}


def of_later(document: Any, values: set[str]) -> Any:
    """Put a value of a later release in the place of these, as values or keys."""
    if isinstance(document, dict):
        return {LATER if key in values else key: of_later(each, values) for key, each in document.items()}
    if isinstance(document, list | tuple):
        return [of_later(each, values) for each in document]
    return LATER if isinstance(document, str) and document in values else document


def only_in(model: Any, name: str, document: Any) -> Any:
    """The example of a message with an unknown value of one enumeration."""
    if name == "ExperimentKind":
        return document | {"kind": LATER}
    values = set(VALUES[name].split())
    if model is ServiceView and name == "WorkState":
        return document | {"observed": document["observed"] | {"state": LATER}}
    changed = of_later(document, values)
    assert changed != document, f"the example of {model.__name__} has no {name}"
    return changed


@pytest.mark.parametrize(
    ("message", "name"), [(model, name) for model in MESSAGES for name in sorted(enumerations(model))]
)
def test_a_value_of_a_later_release_is_shown_or_passed_over_and_refused_where_it_decides(
    message: Any, name: str
) -> None:
    place, example = (message.__name__, name), EXAMPLES[message.__name__]
    message.model_validate(example)
    assert (place in SHOWN) is not (place in DECIDING), "say what a reader does with a value that it does not know"

    given = only_in(message, name, example)

    if place in DECIDING:
        with pytest.raises(ValidationError):
            message.model_validate(given)
        return
    read = message.model_validate_json(json.dumps(given))
    again = message.model_validate_json(read.model_dump_json())
    assert again == read and read.model_dump(mode="json") == again.model_dump(mode="json")


def test_a_state_of_a_later_release_is_none_of_those_that_are_known() -> None:
    read = ObservedState.model_validate({"state": LATER, "publication": {"version": 1, "epoch": 1, "state": LATER}})

    assert read.state == LATER == read.state.value and read.state not in set(WorkState)
    assert isinstance(read.state, WorkState) and LATER not in {each.value for each in WorkState}
    assert read.publication is None, "no publication goes on by it"
    assert ObservedState.model_validate({"state": LATER}).state is read.state, "no change is seen where there is none"
    with pytest.raises(ValidationError):
        ObservedState.model_validate({"state": "x" * 65})
    with pytest.raises(ValidationError):
        ObservedState.model_validate({"state": 3})
