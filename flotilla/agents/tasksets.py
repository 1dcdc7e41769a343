"""Tasksets of verifiers 0.4 (the ``verifiers.v1`` interface), unchanged: each episode is one of its environment's.

The package is not ours and not a dependency: run this with the interpreter that has it, and the taskset, installed.
Its harness talks to the package's own relay, which passes each request on to the episode's endpoint as it came.
"""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from flotilla.agents.episodes import Episode, EpisodeLost, Verdict
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.bearer_client import tls_context

TASK = "verifiers_task"
"""Column of the rows that has the task's data, as JSON."""
KEY = "FLOTILLA_EPISODE_API_KEY_"
"""What the variables begin with that name each episode's key: harnesses inherit none whose name has API_KEY in it."""


def has_tasksets() -> bool:
    """Return whether the verifiers that is installed has tasksets, and the environments before them no longer."""
    if importlib.util.find_spec("verifiers") is None:
        return False
    import verifiers

    return not hasattr(verifiers, "load_environment")


def load_taskset(name: str, options: Mapping[str, Any]) -> Any:
    """Load the environment of a taskset: an installed one by its id, or a file that exports one.

    Args:
        name: of it.
        options: of the environment, as verifiers' ``[env]``: ``taskset``, ``agent`` and others. Harnesses run on this
            machine (``agent.runtime.type`` subprocess) unless it sets another.

    Raises:
        InvalidSpec: verifiers is not installed, or refuses the options.
        Exception: whatever the taskset's code raises.
    """
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise InvalidSpec(f"this needs the package verifiers (pip install 'verifiers==0.4.0'): {error}") from error
    path = Path(name)
    if name.endswith(".py"):
        if not path.is_file():
            raise InvalidSpec(f"there is no Python file {name}")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    data = {**options, "taskset": {**dict(options.get("taskset") or {}), "id": name}}
    if "id" not in options:
        data["agent"] = {"runtime": {"type": "subprocess"}, **dict(options.get("agent") or {})}
    try:
        return load_environment(resolve_env_config(data))
    except (ValueError, ImportError, AttributeError) as error:
        raise InvalidSpec(f"verifiers does not load {name!r}: {error}") from error


def rows_of_taskset(environment: Any, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Make the experiment's rows of the taskset's tasks.

    Raises:
        InvalidSpec: it never ends, and no limit is given.
    """
    taskset = environment.taskset
    if limit is None and not taskset.bounded:
        raise InvalidSpec("the taskset is infinite: give the number of rows with --limit")
    for task in islice(taskset, limit):
        yield {"prompt": _messages(task.data), TASK: task.data.model_dump_json()}


def _messages(data: Any) -> list[dict[str, str]]:
    said = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str | None):
        return [*said, {"role": "user", "content": data.prompt or ""}]
    return said + [{"role": each.role, "content": str(each.content or "")} for each in data.prompt]


class TasksetAgent:
    """Plays episodes as episodes of one environment, with its own rewards.

    Args:
        environment: as ``load_taskset`` made it, between ``serving``.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._task = type(environment.taskset).task_type()

    async def __call__(self, episode: Episode) -> Verdict:
        """Play one episode.

        Raises:
            EpisodeLost: the rollout failed, so that it has no reward.
            InvalidSpec: the row has no task.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        given = episode.task["metadata"].get(TASK)
        if not isinstance(given, str):
            raise InvalidSpec(f"the rows have no column {TASK}: verifiers-rows writes it")
        data = self._task.data_type().model_validate_json(given)
        task = self._task(data, self._environment.taskset.config.task)
        variable = f"{KEY}{episode.id.replace('-', '_').replace('.', '_').upper()}"
        client = EvalClientConfig(base_url=episode.base_url, api_key_var=variable)
        os.environ[variable] = episode.key
        try:
            played = await self._environment.run_episode(task, ModelContext(episode.model, client))
        finally:
            del os.environ[variable]
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok or not played.traces:
            raise EpisodeLost("; ".join(f"{each.type}: {each.message}"[:500] for each in errors) or "it has no trace")
        trained = [trace for trace in played.traces if trace.agent.trainable] or played.traces
        if any(value is None for trace in trained for value in trace.rewards.values()):
            raise EpisodeLost("a reward was not computed")
        metrics = {name: float(value) for name, value in trained[0].metrics.items() if value is not None}
        metrics["timed_out"] = float(any(trace.is_timeout for trace in trained))
        return Verdict(fmean(trace.reward for trace in trained), metrics)


@asynccontextmanager
async def serving(environment: Any) -> AsyncIterator[TasksetAgent]:
    """Hold what the environment's episodes share; each has a relay of its own, which ends with it and its key."""
    from verifiers.v1.clients import eval as relayed

    relayed.build_async_httpx = _connections
    async with environment.serving():
        # A shared relay keeps a client for each endpoint and key until all ends.
        environment._interception = None
        yield TasksetAgent(environment)


def _connections(config: Any) -> httpx.AsyncClient:
    """Make a relay's client as the package does, but for authorities: it would read them again for every episode."""
    from verifiers.v1.clients.base import DEFAULT_LIMITS

    timeout = httpx.Timeout(**config.timeout.model_dump())
    return httpx.AsyncClient(timeout=timeout, limits=DEFAULT_LIMITS, verify=tls_context())
