"""What episodes of a spec name is run and called only where the operator allows it, by gateway and rollout."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flotilla.services.gateway.preflight.checks import check_code, check_paths
from flotilla.services.rollout.session import SessionOpener
from flotilla.services.rollout.tools.opening import open_tools
from flotilla.shared.config.load.paths import resolve_paths
from flotilla.shared.config.sections.episodes import EpisodesConfig, ToolEpisodesConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, EpisodeFailed, FlotillaError, InvalidSpec
from flotilla.shared.locations.allowed import Places, check_episodes, grant_code, read_places
from flotilla.shared.schemas.service import Assignment
from flotilla.shared.testing.builders import a_task
from tests.unit.gateway.builders import a_spec

CODE_REFUSED = "FLOTILLA_CODE_FOLDERS"
UP = "../" * 40
SCHEMA = {"type": "function", "function": {"name": "ask", "parameters": {}}}


def environment(name: str, **options: Any) -> dict[str, Any]:
    return {"kind": "environment", "environments": [{"environment": name, "options": options}]}


def tools(**tool: Any) -> dict[str, Any]:
    return {"kind": "tools", "tools": [tool]}


def episodes(document: Mapping[str, Any]) -> EpisodesConfig:
    return TypeAdapter[EpisodesConfig](EpisodesConfig).validate_python(document)


def spec_with(document: Mapping[str, Any]) -> ExperimentSpec:
    spec = a_spec()
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"episodes": episodes(document)})})


@pytest.mark.parametrize(
    "document",
    [
        environment(f"{subprocess.__file__}:Popen", args=["id"]),
        environment(f"{UP}{subprocess.__file__}:Popen", args=["id"]),
        environment(f"/\n/..{subprocess.__file__}:Popen", args=["id"]),
        environment("/tmp/x.py:ünnamed"),
        environment("/tmp/x.py:\u2118"),
        tools(kind="python", path=f"{UP}{subprocess.__file__}:getoutput"),
        tools(kind="mcp", command=["sh", "-c", "id"]),
        tools(kind="mcp", command=["/bin/sh", "-c", "id"]),
    ],
)
async def test_code_and_programs_that_nobody_allowed_are_refused_by_gateway_and_rollout(
    document: dict[str, Any],
) -> None:
    spec = spec_with(document)
    for places in (Places(), Places(code=(Path("/bin").resolve(), Path("/srv")))):
        with pytest.raises(InvalidSpec, match=CODE_REFUSED):
            check_code(spec, places)
        opener = SessionOpener(*[None] * 4, places=places)  # type: ignore[arg-type, misc]  # it is refused before any is used
        with pytest.raises(InvalidSpec, match=CODE_REFUSED):
            await opener(spec, Assignment.model_construct(), lambda: None, lambda error: None)


@pytest.mark.parametrize("name", ["gymnasium:os:CliffWalking-v1", "gymnasium:a/b/c-v0", "gymnasium:x.py:Class"])
def test_a_name_of_gymnasium_imports_no_module(name: str) -> None:
    with pytest.raises(ValidationError, match="must be one of"):
        episodes(environment(name))


@pytest.mark.parametrize(
    "document",
    [
        environment("lake.py:Lake"),
        tools(kind="python", path="tools.py:add"),
        tools(kind="http", url="http://example.org", tool_schema="weather.json"),
    ],
)
def test_files_of_episodes_are_absolute_in_a_request_and_relative_to_the_folder_in_a_file(
    document: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec, match="absolute path"):
        check_paths(spec_with(document))

    resolved = resolve_paths({"rollout": {"episodes": document}}, tmp_path)["rollout"]["episodes"]

    assert str(tmp_path) in json.dumps(resolved)
    check_episodes(episodes(resolved), Places(code=(tmp_path,)))


def test_a_local_user_allows_code_and_one_command_by_starting_the_file(tmp_path: Path) -> None:
    document = {
        "kind": "tools",
        "tools": [{"kind": "python", "path": f"{tmp_path}/t.py:add"}, {"kind": "mcp", "command": ["python", "s.py"]}],
    }
    places = read_places({}, tmp_path)
    with pytest.raises(InvalidSpec):
        check_episodes(episodes(document), places)

    grant_code(tmp_path, {"rollout": {"episodes": document}})

    check_episodes(episodes(document), places)
    with pytest.raises(InvalidSpec, match=CODE_REFUSED):
        check_episodes(episodes(tools(kind="mcp", command=["python", "-c", "1"])), places)


def test_a_program_is_named_itself_and_schemas_are_where_data_is(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.touch()
    started = episodes(tools(kind="mcp", command=[str(program), "--all"]))
    check_episodes(started, Places(code=(program,)))
    with pytest.raises(InvalidSpec, match=CODE_REFUSED):
        check_episodes(started, Places(code=(tmp_path,)))
    with pytest.raises(DataError, match="FLOTILLA_DATA_FOLDERS"):
        check_episodes(
            episodes(tools(kind="http", url="http://example.org", tool_schema="/etc/x.json")), Places(data=(tmp_path,))
        )


@pytest.mark.parametrize("host", ["169.254.169.254", "10.0.0.1", "[::ffff:10.0.0.1]", "127.0.0.1:1"])
async def test_the_urls_of_tools_are_under_the_address_policy_of_graders(host: str) -> None:
    http = ToolEpisodesConfig.model_validate(tools(kind="http", url=f"http://{host}/x", tool_schema=SCHEMA))
    box = await open_tools(http, networks=())
    try:
        with pytest.raises(EpisodeFailed, match="FLOTILLA_GRADER_NETWORKS"):
            await (await box.for_episode(a_task()).open())["ask"].call({})
    finally:
        await box.aclose()
    pytest.importorskip("mcp")
    with pytest.raises(FlotillaError, match="FLOTILLA_GRADER_NETWORKS"):
        await open_tools(ToolEpisodesConfig.model_validate(tools(kind="mcp", url=f"http://{host}/x")), networks=())
