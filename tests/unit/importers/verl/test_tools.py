"""verl's file of tools: known classes become tools of ours, others are refused by name."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.importers.build import Imported, build
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS, read
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig
from tests.unit.importers.sources import BASES, nested

MULTI = "actor_rollout_ref.rollout.multi_turn"


def tool(kind: str, name: str, **config: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"answer": {"type": "string"}}}
    function = {"name": name, "description": f"{name} it.", "parameters": parameters}
    return {"class_name": f"verl.tools.x.{kind}", "config": config, "tool_schema": {"function": function}}


def imported(*tools: dict[str, Any], at: str = "conf/tools.yaml", **multi: Any) -> Imported:
    values = {**BASES["verl"], f"{MULTI}.tool_config_path": "conf/tools.yaml", f"{MULTI}.enable": True}
    values |= {f"{MULTI}.{name}": value for name, value in multi.items()}
    files = {at: yaml.safe_dump({"tools": list(tools)})}
    given = read("verl", yaml.safe_dump(nested(values)), (), {}, source="launch.yaml", beside=files.get)
    return build(SYSTEMS["verl"], given, rows=100_000)


def test_known_classes_become_tools_of_ours(tmp_path: Path) -> None:
    found = imported(
        tool("Gsm8kTool", "check"), tool("CustomSandboxFusionTool", "python", default_timeout=20),
        max_user_turns=4, max_assistant_turns=9, max_parallel_calls=2, max_tool_response_length=512,
    )  # fmt: skip

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.runs_code
    episodes = found.spec.rollout.episodes
    assert isinstance(episodes, ToolEpisodesConfig)
    function, interpreter = episodes.tools
    assert (function.kind, interpreter.kind) == ("python", "code_interpreter")
    assert interpreter.model_dump()["name"] == "python" and interpreter.model_dump()["run_seconds"] == 20.0
    assert (episodes.max_turns, episodes.max_parallel_calls, episodes.max_result_characters) == (5, 2, 512)
    entries = {entry.name: entry.verdict for entry in found.report.entries}
    assert entries[f"{MULTI}.tool_config.check"] is Verdict.TRANSLATED
    path = tmp_path / "check_tool.py"
    path.write_text(found.files["check_tool.py"])
    made = importlib.util.spec_from_file_location("check_tool", path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    row = {"label": None, "reward_model": {"ground_truth": "1,234"}}
    assert module.check("so 1234.", row=row) == "Current parsed answer='#### so 1234.' reward=1.0"
    assert module.check("5", row={"label": "6"}).endswith("reward=0.0")
    assert module.check.schema["function"]["name"] == "check"


@pytest.mark.parametrize("at", ["conf/tools.yaml", "../../conf/tools.yaml", "tools.yaml"])
def test_the_file_is_found_beside_above_or_in_the_folder_that_is_given(at: str) -> None:
    assert imported(tool("Gsm8kTool", "check"), at=at).may_run()


def test_a_file_that_is_missing_is_refused() -> None:
    found = imported(at="elsewhere.yaml")

    refused = {entry.name: entry.detail for entry in found.report.refused}
    assert "--config-dir" in refused[f"{MULTI}.tool_config_path"]
    assert not found.may_run()


def test_an_unknown_class_is_refused_by_name_and_the_others_are_kept() -> None:
    found = imported(tool("Gsm8kTool", "check"), tool("ImageZoomInTool", "zoom"))

    refused = {entry.name: entry.detail for entry in found.report.refused}
    assert list(refused) == [f"{MULTI}.tool_config.zoom"]
    assert "ImageZoomInTool is no tool" in refused[f"{MULTI}.tool_config.zoom"]
    assert found.spec is not None and isinstance(found.spec.rollout.episodes, ToolEpisodesConfig)
    assert len(found.spec.rollout.episodes.tools) == 1
