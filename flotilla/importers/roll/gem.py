"""Environments that ROLL takes from GEM, or registers with it: a file beside the spec that makes and plays them."""

import json
from collections.abc import Mapping
from typing import Any, Final

FILE: Final = "roll_environments.py"
OF_ROLL: Final = frozenset({"webshop"})
"""Environments of ROLL's own that its plain manager plays, by the names that it registers with GEM."""
QUESTIONS: Mapping[str, str] = {"roll_math": "gem.envs.math_env:MathEnv", "roll_qa": "gem.envs.qa_env:QaEnv"}
"""Those that are GEM's own, and how they are found: ROLL's draw rows from a process of Ray's."""
CODE: Final = "python_code"
TOOLS: Final = (CODE, "search", "mcp")
"""Tools that ROLL registers for environments."""
PREFIXES: Final = ("game:", "math:", "qa:")
"""Kinds of GEM's own."""

TEXT: Final = '''"""Plays environments of GEM and ROLL. Written by `flotilla import roll`.

Needs gem-llm where rollouts run, and ROLL beside it (on PYTHONPATH) for environments and tools of its own. Programs
that the policy writes run in bubblewrap (bwrap), whatever the launch file says of a sandbox.
"""

import importlib
import shutil

import gem

CLASSES = {classes}


class Environment:
    """One of them, by the name and the options that a launch file gives it.

    One that has finished an episode begins the next, as in ROLL: some read a whole dataset when they are made.
    """

    _free = {{}}

    def __init__(self, kind, config, tools=None, after=""):
        self._kind, self._config, self._tools, self._after = kind, config, tools, after
        self._waiting = self._free.setdefault((kind, repr(sorted(config.items())), repr(tools)), [])
        self._now = None
        if not self._waiting:
            self._waiting.append(self._made())

    def reset(self, seed):
        try:
            self._now = self._waiting.pop()
        except IndexError:
            self._now = self._made()
        observation, info = self._now.reset(seed=seed)
        return self._shown(observation, info), self._told(observation, info)

    def step(self, text):
        observation, reward, terminated, truncated, info = self._now.step(text)
        if terminated or truncated:
            self._waiting.append(self._now)
        return self._shown(observation, info), reward, terminated, truncated, self._told(observation, info)

    def _told(self, observation, info):
        metrics = info.get("metrics") or {{}}
        told = {{"instruction": info.get("env_instruction") or "", "metrics": metrics, "remembered": observation}}
        is_valid = bool(metrics.get("action_is_valid", True))
        return {{**told, "is_valid": is_valid, "action": info.get("action_content")}}

    def _shown(self, observation, info):
        return observation + self._after.replace("{{suffix}}", str(info.get("suffix") or ""))

    def _made(self):
        made = self._bare()
        if self._tools is None:
            return made
        if any(each["tool_id"] == "python_code" for each in self._tools["tool_configs"]) and not shutil.which("bwrap"):
            raise RuntimeError("programs of the policy run in bubblewrap, and there is no bwrap: install it")
        wrapper = importlib.import_module("roll.pipeline.agentic.tools.tool_env_wrapper")
        return wrapper.tool_wrapper(made, **self._tools)

    def _bare(self):
        if self._kind in CLASSES:
            module, _, name = CLASSES[self._kind].partition(":")
            return getattr(importlib.import_module(module), name)(**self._config)
        if ":" not in self._kind:
            importlib.import_module("roll.pipeline.agentic.env")  # registers ROLL's own
        return gem.make(env_id=self._kind, **self._config)
'''


def is_played(kind: object) -> bool:
    """Whether the file plays an environment of this name."""
    return isinstance(kind, str) and (kind in OF_ROLL or kind in QUESTIONS or kind.startswith(PREFIXES))


def written() -> str:
    """Write the file."""
    return TEXT.format(classes=json.dumps(dict(QUESTIONS)))


def tools(wrapper: Any) -> dict[str, Any] | str:
    """Make what the file wraps an environment in; or say what of it is not offered.

    Programs run in bubblewrap: ROLL runs them without a sandbox unless told otherwise.
    """
    configs = wrapper.get("tool_configs") if isinstance(wrapper, Mapping) else None
    if not isinstance(configs, list) or not all(isinstance(each, Mapping) for each in configs):
        return "wants tool_configs, a list of tools with a tool_id and tool_args"
    made = []
    for each in configs:
        name, arguments = each.get("tool_id"), dict(each.get("tool_args") or {})
        if name not in TOOLS:
            return f"of tools {', '.join(TOOLS)} are offered, not {name}"
        made.append({"tool_id": name, "tool_args": arguments | ({"sandbox_type": "bwrap"} if name == CODE else {})})
    return {"wrapper_args": dict(wrapper.get("wrapper_args") or {}), "tool_configs": made}


def environment(kind: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Make the section of an environment that the file plays.

    Args:
        more: further options: ``tools``, and text that follows each observation, as ``after``.
    """
    options = {"kind": kind, "config": dict(config), **{name: value for name, value in more.items() if value}}
    return {"environment": f"{FILE}:Environment", "options": options}
