"""The agent of an environment that a spec names is started only where gateway and rollout allow it."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.connection import allow_fork
from flotilla.services.gateway.preflight.checks import check_code
from flotilla.services.rollout.session import SessionOpener
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.locations.allowed import GRANTS, Places, check_agents, grant_code, read_places
from flotilla.shared.schemas.service import Assignment
from tests.unit.config.test_agents import GYM, HARBOR, TASKSET, spec_with


def check(environment: dict[str, Any], places: Places) -> None:
    check_agents(spec_with(environment).rollout.agents, places)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """An operator who has named a harness, an interpreter, and a folder with tasks and what the harness reads."""
    for name in ("harness", "python", "open/tasks/t", "open/lib"):
        (tmp_path / name).mkdir(parents=True)
    return Places(code=(tmp_path / "harness", tmp_path / "python", tmp_path / "open"))


@pytest.mark.parametrize("environment", [HARBOR, TASKSET, {**TASKSET, "python": "/usr/bin/python3"}])
async def test_what_nobody_allowed_is_refused_by_gateway_and_rollout(environment: dict[str, Any]) -> None:
    spec = spec_with(environment)
    for places in (Places(), Places(code=(Path("/srv"), Path("/usr")))):
        with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
            check_code(spec, places)
        opener = SessionOpener(*[None] * 4, places=places)  # type: ignore[arg-type, misc]  # it is refused before any is used
        with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
            await opener(spec, Assignment.model_construct(), lambda: None, lambda error: None)


def test_a_server_is_bounded_by_networks_alone() -> None:
    check(GYM, Places())


@pytest.mark.parametrize(
    "harness",
    ["{}/harness", '{}/harness -t "$INSTRUCTION" -m "openai/$MODEL" --seed=1'],
)
def test_a_harness_over_rest_is_a_program_of_the_operators_with_arguments(
    harness: str, places: Places, tmp_path: Path
) -> None:
    given = {"tasks": f"{tmp_path}/open/tasks", "readable": [f"{tmp_path}/open/lib", f"{tmp_path}/harness"]}

    check({**HARBOR, "harness": harness.format(tmp_path), **given}, places)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"harness": "harness"}, "harness"),
        ({"harness": "{}/open/lib"}, "harness"),
        ({"harness": "A=b {}/harness"}, "harness"),
        ({"harness": "{}/harness; id"}, "harness"),
        ({"harness": "{}/harness\nid"}, "harness"),
        ({"harness": "{}/harness | sh"}, "harness"),
        ({"harness": "{}/harness > /x"}, "harness"),
        ({"harness": "{}/harness & id"}, "harness"),
        ({"harness": '{}/harness "$(id)"'}, "harness"),
        ({"harness": "{}/harness `id`"}, "harness"),
        ({"harness": "{}/harness ${{IFS}}"}, "harness"),
        ({"harness": " "}, "harness"),
        ({"tasks": "{}"}, "tasks"),
        ({"tasks": "{}/open/../elsewhere"}, "tasks"),
        ({"readable": ["{}/open/lib", "{}"]}, "readable.1"),
        ({"readable": ["/"]}, "readable.0"),
        ({"secrets": ["AWS_SECRET_ACCESS_KEY"]}, "secrets.0"),
    ],
)
def test_nothing_else_of_a_shell_or_of_the_machine_is_reached_over_rest(
    changes: dict[str, Any], field: str, places: Places, tmp_path: Path
) -> None:
    def placed(value: Any) -> Any:
        return [placed(each) for each in value] if isinstance(value, list) else value.format(tmp_path)

    usual = {"harness": f"{tmp_path}/harness", "tasks": f"{tmp_path}/open/tasks"}
    changed = {name: placed(value) for name, value in changes.items()}

    with pytest.raises(InvalidSpec, match=rf"rollout\.agents\.environment\.{field}"):
        check(HARBOR | usual | changed, places)


def test_an_interpreter_is_named_as_it_is_written(places: Places, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(tmp_path / "python")
    mine = {**TASKSET, "python": f"{tmp_path}/python", "options": {"taskset": {"path": "/x"}}}
    check(mine, places)
    check({**mine, "taskset": f"{tmp_path}/open/taskset.py"}, places)

    with pytest.raises(InvalidSpec, match=r"environment\.python"):
        check({**mine, "python": str(other)}, places)
    with pytest.raises(InvalidSpec, match=r"environment\.taskset"):
        check({**mine, "taskset": f"{tmp_path}/elsewhere.py"}, places)


@pytest.mark.parametrize(
    ("environment", "change"),
    [
        ({**HARBOR, "secrets": ["A"]}, {"harness": "play; id"}),
        (HARBOR, {"secrets": ["A"]}),
        (TASKSET, {"options": {"agent": {"harness": {"id": "bash"}}}}),
        (TASKSET, {"taskset": "another"}),
    ],
)
def test_a_local_user_allows_one_environment_as_it_is_by_starting_the_file(
    environment: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    places = read_places({}, tmp_path)
    with pytest.raises(InvalidSpec):
        check(environment, places)

    grant_code(tmp_path, {"rollout": {"agents": {"environment": environment}}})
    grant_code(tmp_path, {"rollout": {"agents": {"environment": change}}})

    check(environment, places)
    with pytest.raises(InvalidSpec, match="FLOTILLA_CODE_FOLDERS"):
        check(environment | change, places)


@pytest.mark.parametrize(
    ("environment", "change"),
    [
        (HARBOR, {"harness": "play; id"}),
        (HARBOR, {"harness": "play --more", "secrets": ["A"], "parallel": 2}),
        (TASKSET, {"options": {"agent": {"harness": {"id": "bash"}}}}),
        (TASKSET, {"taskset": "another"}),
        (TASKSET, dict(HARBOR)),
    ],
)
def test_a_local_user_allows_what_a_fork_changes_in_an_environment_and_nothing_else(
    environment: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    places = read_places({}, tmp_path)
    forked = environment | change if change.get("kind", environment["kind"]) == environment["kind"] else change
    spec = {"rollout": {"agents": {"environment": environment}}}
    changes = {"rollout": {"agents": {"environment": change}}}
    allow_fork("http://elsewhere", tmp_path, spec, changes, {})
    allow_fork(None, tmp_path, spec, {"rollout": {"group_size": 4}}, {})
    allow_fork(None, tmp_path, spec, {"rollout": {"agents": None}}, {})
    with pytest.raises(InvalidSpec, match="or fork with `flotilla fork`"):
        check(forked, places)

    allow_fork(None, tmp_path, spec, changes, {})

    check(forked, places)
    with pytest.raises(InvalidSpec):
        check(environment, places)


@pytest.mark.parametrize(
    ("environment", "change"), [(HARBOR, {"parallel": 3, "seconds": 60.0}), (TASKSET, {"parallel": 3})]
)
def test_how_many_play_and_how_long_is_nobodys_to_allow(
    environment: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    places = read_places({}, tmp_path)
    grant_code(tmp_path, {"rollout": {"agents": {"environment": environment | change}}})

    check(environment, places)
    check(environment | change | {"parallel": 5}, places)


def test_what_an_earlier_release_wrote_down_is_allowed_as_it_was(tmp_path: Path) -> None:
    environment = {**HARBOR, "parallel": 3}
    whole = spec_with(environment).rollout.agents
    assert whole is not None and whole.environment is not None
    line = json.dumps(["environment", whole.environment.model_dump_json(exclude_defaults=True)])
    (tmp_path / GRANTS).write_text(f"{line}\n")

    check(environment, read_places({}, tmp_path))
