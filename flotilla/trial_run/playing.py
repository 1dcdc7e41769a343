"""Environments and tools of a trial: those that are here, stand-ins for the others, and what a policy says to them."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from flotilla.importers.verl.tool_classes import name_in, needed_by
from flotilla.shared.config.sections.episodes import (
    CodeInterpreterConfig,
    EnvironmentConfig,
    EnvironmentEpisodesConfig,
    PythonToolConfig,
    ToolConfig,
    ToolEpisodesConfig,
)
from flotilla.shared.config.sections.rollout import RolloutConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.trial_run.edits import Edits
from flotilla.trial_run.stand_ins import ENVIRONMENT, TOOL, call_of, named

ACTIONS: Final = ("Up", "Down", "Left", "Right")
NEEDED: Final = "gem"
"""The package that environments written by an import need."""
NOT_HERE: Final = "it is not here: one of the same signature"


def replace_players(
    edits: Edits, spec: ExperimentSpec, files: Mapping[str, str], made: dict[str, str], base: Path
) -> None:
    """Change what cannot be played on this machine; the import's own files become files of the trial."""
    episodes = spec.rollout.episodes
    if isinstance(episodes, EnvironmentEpisodesConfig):
        for number, each in enumerate(episodes.environments):
            if each.is_code:
                field = f"rollout.episodes.environments.{number}"
                _code(edits, f"{field}.environment", each.environment, ENVIRONMENT, files, made, base)
                if edits.at(f"{field}.environment").startswith("stand_in"):
                    edits.set(f"{field}.options", {}, "as above")
    if isinstance(episodes, ToolEpisodesConfig):
        for number, tool in enumerate(episodes.tools):
            field = f"rollout.episodes.tools.{number}"
            if isinstance(tool, PythonToolConfig):
                _code(edits, f"{field}.path", tool.path, TOOL, files, made, base)
            elif not isinstance(tool, CodeInterpreterConfig):
                name = f"stand_in_tool_{number}"
                made[f"{name}.py"] = named(TOOL, name)
                stand_in = PythonToolConfig(kind="python", path=f"{name}.py:{name}")
                edits.set(field, stand_in.model_dump(mode="json"), "no server is asked in a trial")


def _code(
    edits: Edits, field: str, reference: str, stand_in: str, files: Mapping[str, str], made: dict[str, str], base: Path
) -> None:
    file, _, name = reference.rpartition(":")
    written, there = files.get(Path(file).name), base / Path(file).expanduser()
    missing = None if written is None else _missing(written)
    if written is not None and missing is None:
        made[Path(file).name] = written
        return
    if written is None and there.is_file():
        edits.set(field, f"{there.resolve()}:{name}", "the same file, by its absolute path")
        return
    made[f"stand_in_{name.lower()}.py"] = named(stand_in, name)
    why = f"{missing} is not here: a stand-in" if missing is not None else NOT_HERE
    edits.set(field, f"stand_in_{name.lower()}.py:{name}", why)


def _missing(written: str) -> str | None:
    """Name what a file that an import wrote needs and is not installed here."""
    if f"import {NEEDED}" in written:
        return f"the package {NEEDED}" if find_spec(NEEDED) is None else None
    module = needed_by(written)
    return f"the module {module}" if module is not None and find_spec(module.partition(".")[0]) is None else None


def answers_in_episodes(edits: Edits, made: Mapping[str, str]) -> list[str]:
    """List actions and calls that environments and tools understand."""
    episodes = RolloutConfig.model_validate(edits.document["rollout"]).episodes
    if isinstance(episodes, EnvironmentEpisodesConfig):
        return [answer for each in episodes.environments for answer in _actions(each)]
    if isinstance(episodes, ToolEpisodesConfig):
        return [_call(tool, made, is_llama=episodes.format == "llama") for tool in episodes.tools]
    return []


def _actions(environment: EnvironmentConfig) -> list[str]:
    is_tagged = "<answer>" in str(environment.options.get("action_pattern"))
    return [f"<answer>{action}</answer>" if is_tagged else f"{action}\n" for action in ACTIONS]


def _call(tool: ToolConfig, made: Mapping[str, str], *, is_llama: bool) -> str:
    if isinstance(tool, CodeInterpreterConfig):
        name, arguments = tool.name, {"code": "print(1)"}
    else:
        file, _, name = str(getattr(tool, "path", "")).rpartition(":")
        arguments = call_of(made.get(file) or _text(file), name)
        name = name_in(file) or name
    if is_llama:
        return json.dumps({"name": name, "parameters": arguments})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
