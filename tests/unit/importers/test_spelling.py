"""SwanLab, as each system names it, becomes the tracker of that kind; no account's key is shown."""

from typing import Any

import pytest

from flotilla.importers.spelling import swanlab_project
from tests.unit.importers.sources import BASES, import_flat


@pytest.mark.parametrize(
    ("system", "written", "project"),
    [
        ("verl", {"trainer.logger": ["console", "swanlab"], "trainer.project_name": "a team/run"}, "a_team_run"),
        ("roll", {"track_with": "swanlab", "tracker_kwargs": {"project": "roll-agentic"}}, "roll-agentic"),
    ],
)
def test_swanlab_is_translated_with_its_project(system: str, written: dict[str, Any], project: str) -> None:
    imported = import_flat(system, {**BASES[system], **written})

    assert imported.document["tracking"]["trackers"] == [{"kind": "swanlab", "project": project}]
    assert "swanlab is none of the trackers" not in imported.report.render()


def test_a_key_of_swanlab_in_roll_s_file_is_dropped_and_not_shown() -> None:
    kwargs = {
        "login_kwargs": {"api_key": "0123456789"},
        "project": "p",
        "experiment_name": "e",
        "logdir": "debug",
        "tags": ["t"],
    }
    imported = import_flat("roll", {**BASES["roll"], "track_with": "swanlab", "tracker_kwargs": kwargs})

    assert "0123456789" not in imported.report.render() + str(imported.document)
    assert imported.document["tracking"]["trackers"] == [{"kind": "swanlab", "project": "p"}]


def test_what_swanlab_refuses_in_a_project_s_name_is_replaced() -> None:
    assert swanlab_project("réseau: a/b") == "r_seau__a_b" and len(swanlab_project("x" * 200)) == 100
