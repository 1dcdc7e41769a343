"""The local paths of a spec: made absolute, from the folder of its file."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.shared.config.sections.data import is_url
from flotilla.shared.config.sections.model import is_hub_name

PATH_FIELDS = (("model", "path"), ("data", "path"), ("data", "dump"), ("evaluation", "path"))
MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
"""``package.module:name``, which is searched for in the folder."""
ROW_LISTS = (("data", "sources"), ("evaluation", "sets"))


HOSTED_KINDS = frozenset({"reward_model", "judge_model"})
"""Graders whose model the reward service loads."""


def resolve_paths(document: Mapping[str, Any], folder: Path, *, made: str = "") -> dict[str, Any]:
    """Make the spec's local paths absolute, so that they mean the same in every process.

    A model's OWNER/NAME is one on the hub, and stays, where the folder has no OWNER and ``made``, the path of what is
    made there later, does not begin with it.

    So it is with the paths of a teacher, a critic, a reward model and a judge that is served here. URLs stay. A custom
    verifier's ``path.py:function`` counts as a path, in ``reward`` at any depth, and so do a custom dataset's
    ``path.py:Class``, an environment or a tool in a file, and what an environment of agents is made of.
    ``package.module:name`` becomes the path of the module in the folder, and stays where there is none.
    """
    resolved: dict[str, Any] = json.loads(json.dumps(document, default=str))
    for section, field in PATH_FIELDS:
        if section != "model" or not _names_hub(resolved.get(section), folder, made):
            _resolve_path(resolved.get(section), field, folder)
    for role in _roles(resolved):
        if not _names_hub(role, folder, made):
            _resolve_path(role, "path", folder)
    for section, field in ROW_LISTS:
        rows = _within(resolved, section, field)
        for each in rows if isinstance(rows, list) else []:
            _resolve_path(each, "path", folder)
            _resolve_code(each, "custom", folder)
            _resolve_more(each, folder)
    _resolve_path(_within(resolved, "data", "images"), "folder", folder)
    _resolve_recorded(_within(resolved, "rollout", "engine"), folder)
    held_out = _within(resolved, "job", "held_out")
    _resolve_path(held_out, "path", folder)
    _resolve_code(held_out, "custom", folder)
    checkpoint = resolved.get("checkpoint")
    if isinstance(checkpoint, dict) and "/" in str(checkpoint.get("resume_from")):
        # Without a slash it names an experiment.
        _resolve_path(checkpoint, "resume_from", folder)
    _resolve_functions(resolved.get("reward"), folder)
    _resolve_reward_models(resolved.get("reward"), folder, made)
    _resolve_episodes(_within(resolved, "rollout", "episodes"), folder)
    _resolve_agents(_within(resolved, "rollout", "agents"), folder)
    trackers = _within(resolved, "tracking", "trackers")
    for tracker in trackers if isinstance(trackers, list) else []:
        if isinstance(tracker, dict) and isinstance(tracker.get("directory"), str) and tracker["directory"]:
            tracker["directory"] = _absolute(tracker["directory"], folder)
    return resolved


def _resolve_recorded(engine: Any, folder: Path) -> None:
    _resolve_path(engine.get("recorded") if isinstance(engine, dict) else None, "dump", folder)


def _roles(document: Mapping[str, Any]) -> list[Any]:
    """List the sections of the models that the trainer has beside the policy."""
    taught = _within(document, "algorithm", "distillation")
    teachers = taught.get("teachers") if isinstance(taught, dict) else None
    critic = _within(document, "algorithm", "value_loss")
    return [taught, critic, _within(document, "job", "distillation"), *(teachers if isinstance(teachers, list) else ())]


def _within(document: Mapping[str, Any], section: str, field: str) -> Any:
    values = document.get(section)
    return values.get(field) if isinstance(values, dict) else None


def _resolve_more(rows: Any, folder: Path) -> None:
    more = rows.get("more_paths") if isinstance(rows, dict) else None
    if isinstance(more, list):
        rows["more_paths"] = [
            _absolute(each, folder) if isinstance(each, str) and each and not is_url(each) else each for each in more
        ]


def _names_hub(model: Any, folder: Path, made: str) -> bool:
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str) or not is_hub_name(path):
        return False
    owner = path.partition("/")[0]
    return not (folder / owner).exists() and Path(made).parts[:1] != (owner,)


def _resolve_path(values: Any, field: str, folder: Path) -> None:
    if isinstance(values, dict) and isinstance(values.get(field), str) and values[field] and not is_url(values[field]):
        values[field] = _absolute(values[field], folder)


def _absolute(path: str, folder: Path) -> str:
    """Take a path from a folder; ``~`` is a home, and stays where there is no user of that name."""
    try:
        return str(folder / Path(path).expanduser())
    except RuntimeError:
        return str(folder / path)


def _resolve_reward_models(reward: Any, folder: Path, made: str) -> None:
    sections = [reward, reward.get("audit")] if isinstance(reward, dict) else []
    lists = [each.get("components") for each in sections if isinstance(each, dict)]
    for each in [component for found in lists if isinstance(found, list) for component in found]:
        if isinstance(each, dict) and each.get("kind") == "recorded":
            _resolve_path(each, "dump", folder)
        is_model = isinstance(each, dict) and each.get("kind") in HOSTED_KINDS
        if is_model and not _names_hub(each, folder, made):
            _resolve_path(each, "path", folder)


def _resolve_episodes(episodes: Any, folder: Path) -> None:
    if not isinstance(episodes, dict):
        return
    _resolve_functions(episodes.get("tools"), folder)
    for name, field, resolve in (
        ("environments", "environment", _resolve_code),
        ("tools", "tool_schema", _resolve_path),
    ):
        values = episodes.get(name)
        for each in values if isinstance(values, list) else []:
            resolve(each, field, folder)


def _resolve_agents(agents: Any, folder: Path) -> None:
    environment = agents.get("environment") if isinstance(agents, dict) else None
    if not isinstance(environment, dict):
        return
    for field in ("tasks", "python"):
        _resolve_path(environment, field, folder)
    if str(environment.get("taskset")).endswith(".py"):
        _resolve_path(environment, "taskset", folder)
    readable = environment.get("readable")
    if isinstance(readable, list):
        environment["readable"] = [
            _absolute(each, folder) if isinstance(each, str) and each else each for each in readable
        ]


def _resolve_code(values: Any, field: str, folder: Path) -> None:
    """Make ``file.py:name`` absolute, and the file's path of ``package.module:name``; anything else stays."""
    reference = values.get(field) if isinstance(values, dict) else None
    if not isinstance(reference, str):
        return
    if ".py:" in reference:
        file, _, name = reference.rpartition(":")
        values[field] = f"{_absolute(file, folder)}:{name}"
    elif (module := MODULE.fullmatch(reference)) is not None:
        place = folder.joinpath(*module[1].split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        values[field] = next((f"{file}:{module[2]}" for file in files if file.is_file()), reference)


def _resolve_functions(node: Any, folder: Path) -> None:
    if isinstance(node, dict):
        _resolve_code(node, "path", folder)
        for value in node.values():
            _resolve_functions(value, folder)
    elif isinstance(node, list):
        for value in node:
            _resolve_functions(value, folder)
