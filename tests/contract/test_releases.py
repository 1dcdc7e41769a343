"""Services of two neighbouring releases talk: what one writes the other reads, both ways."""

import copy
from typing import Any

import pytest

from flotilla.services.gateway.routes.publications import FailedReport, SentReport
from flotilla.shared.schemas.episode import EndedEpisode, OpenedEpisode
from flotilla.shared.schemas.samples import SamplePage
from flotilla.shared.schemas.service import DesiredState, ObservedState, Registration, ServiceKind
from tests.contract.releases.messages import MESSAGES, kept, problems, releases, snapshot, version

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
