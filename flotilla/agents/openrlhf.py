"""OpenRLHF's agents (`--agent_func_path`): a file's ``AgentInstance``, played through ``/v1/completions``.

As there, an instance is made for each sample; its texts are the prompt, what the policy samples and the environment's
feedback, with whatever marks of a template the feedback holds; its rewards are added up. The file's own imports of
``openrlhf.utils.agent`` work without that package.
"""

import importlib.util
import inspect
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from flotilla.agents.episodes import Episode, Verdict
from flotilla.agents.policy import ask_policy
from flotilla.shared.errors import InvalidSpec

MODULE = "openrlhf.utils.agent"


class AgentInstanceBase:
    """Replaces OpenRLHF's class of this name."""


class AgentExecutorBase:
    """Replaces OpenRLHF's class of this name."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Replaces OpenRLHF's class of this name: it knows which instances to make."""

    def __init__(self, agent_instance_cls: type[Any], *_: Any, **__: Any) -> None:
        self.agent_instance_cls = agent_instance_cls


def load_agent(path: Path) -> type[Any]:
    """Load the file's class of agents.

    Raises:
        InvalidSpec: it has none with ``reset`` and ``step``.
        Exception: whatever the file's code raises.
    """
    _stand_in()
    spec = importlib.util.spec_from_file_location("openrlhf_agent_file", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidSpec(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, "AgentInstance", None)
    executor = getattr(module, "AgentExecutor", None)
    if found is None and inspect.isclass(executor) and len(inspect.signature(executor).parameters) == 0:
        found = getattr(executor(), "agent_instance_cls", None)
    if not inspect.isclass(found) or not all(callable(getattr(found, name, None)) for name in ("reset", "step")):
        raise InvalidSpec(
            f"{path} has no class AgentInstance with reset and step; an AgentExecutor with an execute of its own "
            "drives OpenRLHF's engine itself: let it talk to the episode's OpenAI endpoint instead (docs/agents.md)"
        )
    return found


def _stand_in() -> None:
    """Put stand-ins in the place of OpenRLHF's module, where that package is not installed."""
    if MODULE in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    module = types.ModuleType(MODULE)
    for each in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor):
        setattr(module, each.__name__, each)
    parts = MODULE.split(".")
    for count in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    sys.modules[MODULE] = module


class OpenRlhfAgent:
    """Plays episodes with instances of one class.

    Args:
        instance: the class.
        client: for completions.
    """

    def __init__(self, instance: type[Any], client: httpx.AsyncClient) -> None:
        self._instance = instance
        self._client = client

    async def __call__(self, episode: Episode) -> Verdict:
        """Play one episode.

        Raises:
            EpisodeLost: a completion was refused, or the fleet has ended the episode.
            ValueError: the agent gave a reward that is no number, or another sampling.
        """
        agent, label = self._instance(), episode.task.get("label") or ""
        begun = await _called(agent.reset, {"observation": episode.task["prompt"], "label": label})
        text, total, is_first = str(begun["observation"]), 0.0, True
        while True:
            action = await self._completion(episode, text, is_first=is_first)
            if action is None:
                return Verdict(total)
            is_first = False
            states = {"observation_text": text, "action_text": action, "label": label, "sampling_params": None}
            found = await _called(agent.step, states)
            total += _number(found["rewards"])
            if found.get("sampling_params") is not None:
                raise ValueError("the agent changes sampling_params: tokens are trained as rollout.sampling says")
            metrics = {name: _number(value) for name, value in dict(found.get("extra_logs") or {}).items()}
            if found.get("scores") is not None:
                metrics["score"] = _number(found["scores"])
            if found["done"]:
                return Verdict(total, metrics)
            text += action + str(found["environment_feedback"])

    async def _completion(self, episode: Episode, text: str, *, is_first: bool) -> str | None:
        """Sample what follows a text; None where there is no room left, which ends OpenRLHF's episodes, too."""
        body = {"model": episode.model, "prompt": text}
        answer = await ask_policy(self._client, episode, "completions", body, is_first=is_first)
        return None if answer is None else str(answer["choices"][0]["text"])


async def _called(method: Any, states: Mapping[str, Any]) -> Mapping[str, Any]:
    found = method(dict(states))
    found = await found if inspect.isawaitable(found) else found
    if not isinstance(found, Mapping):
        raise ValueError(f"{method.__name__} must return a dict, got {type(found).__name__}")  # noqa: TRY004
    return found


def _number(value: Any) -> float:
    """Read a number, or a tensor that holds one."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the agent gave {number}, which is no number")
    return number
