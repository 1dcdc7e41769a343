"""Environments that ROLL takes from GEM, or registers with it: a file beside the spec that makes and plays them."""

import json
from collections.abc import Mapping
from typing import Any, Final

FILE: Final = "roll_environments.py"
OF_ROLL: Final = frozenset({"webshop"})
"""Environments of ROLL's own that its plain manager plays, by the names that it registers with GEM."""
QUESTIONS: Mapping[str, str] = {"roll_math": "gem.envs.math_env:MathEnv", "roll_qa": "gem.envs.qa_env:QaEnv"}
"""Those that are GEM's own, and how they are found: ROLL's draw rows from a process of Ray's."""
PREFIXES: Final = ("game:", "math:", "qa:")
"""Kinds of GEM's own."""

TEXT: Final = '''"""Plays environments of GEM and ROLL. Written by `flotilla import roll`.

Needs gem-llm where rollouts run, and ROLL beside it (on PYTHONPATH) for environments of its own.
"""

import importlib

import gem

CLASSES = {classes}


class Environment:
    """One of them, by the name and the options that a launch file gives it.

    One that has finished an episode begins the next, as in ROLL: some read a whole dataset when they are made.
    """

    _free = {{}}

    def __init__(self, kind, config):
        self._kind, self._config = kind, config
        self._waiting = self._free.setdefault((kind, repr(sorted(config.items()))), [])
        self._now = None
        if not self._waiting:
            self._waiting.append(self._made())

    def reset(self, seed):
        try:
            self._now = self._waiting.pop()
        except IndexError:
            self._now = self._made()
        observation, info = self._now.reset(seed=seed)
        return observation, {{"instruction": info.get("env_instruction") or "", "metrics": info.get("metrics") or {{}}}}

    def step(self, text):
        observation, reward, terminated, truncated, info = self._now.step(text)
        if terminated or truncated:
            self._waiting.append(self._now)
        return observation, reward, terminated, truncated, {{"metrics": info.get("metrics") or {{}}}}

    def _made(self):
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


def environment(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the section of an environment that the file plays."""
    return {"environment": f"{FILE}:Environment", "options": {"kind": kind, "config": dict(config)}}
