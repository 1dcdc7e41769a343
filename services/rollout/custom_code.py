"""The process in which a user's environments and tools run: ``python -m flotilla.services.rollout.custom_code``."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from flotilla.services.rollout.environments.base import Environment, Info, reset
from flotilla.services.rollout.environments.loading import load_environment
from flotilla.services.rollout.episodes.observations import plain
from flotilla.services.rollout.tools.base import ToolFailed
from flotilla.services.rollout.tools.python_tool import PythonTool
from flotilla.shared.children.custom_code import describe
from flotilla.shared.children.serving import serve
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.config.sections.episodes import EnvironmentConfig
from flotilla.shared.errors import EpisodeFailed, Unavailable
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.reward_number import reward_number
from flotilla.shared.schemas.service import ServiceView


async def sandbox_address(client: GatewayClient, experiment_id: str) -> str:
    """Find a sandbox of the experiment, or any while it has none; several processes spread over several.

    Raises:
        Unavailable: there is none now: it may have been killed a moment ago.
    """
    page = await client.call("GET", "/v1/services", params={"kind": "sandbox", "limit": 100})
    views = Page[ServiceView].model_validate(page).items
    usable = [view for view in views if view.experiment_id == experiment_id] or views
    if not usable:
        raise Unavailable("the experiment runs code, which needs a sandbox service, and the fleet has none now")
    return usable[os.getpid() % len(usable)].address


MOST_METRICS, LONGEST_NAME = 32, 200


class CustomCode:
    """Environments, each with its episodes, and functions.

    Args:
        opening: ``{"environments": [section, ...], "tools": ["file.py:function", ...]}``.

    Raises:
        InvalidSpec: one cannot be loaded.
    """

    def __init__(self, opening: Any) -> None:
        sections = [EnvironmentConfig.model_validate(each) for each in opening["environments"]]
        self._makers = [load_environment(each) for each in sections]
        self._tools = [PythonTool(path) for path in opening["tools"]]
        self._episodes: dict[int, Environment] = {}

    @property
    def about(self) -> object:
        """Schemas of the functions, and whether they take the task's row."""
        return {
            "schemas": [tool.schema for tool in self._tools],
            "needs_row": [tool.needs_row for tool in self._tools],
        }

    async def handle(self, content: Any) -> object:
        """Do one of ``make``, ``reset``, ``step``, ``close`` and ``call``; see ``custom/process.py``."""
        do, which, given = content
        try:
            return {"value": await self._do(do, which, given)}
        except ToolFailed as error:
            return {"refused": str(error)}
        except EpisodeFailed as error:
            return {"error": error.detail}
        except Exception as error:  # whatever the user's code raises is this episode's error
            return {"error": describe(error, None)}

    async def _do(self, do: str, which: int, given: Any) -> object:
        if do == "call":
            arguments, row = given
            return await self._tools[which].call(arguments, row)
        if do == "make":
            self._episodes[which] = await _called(self._makers[given])
            return None
        if do == "close":
            close = getattr(self._episodes.pop(which, None), "close", None)
            return str(await _called(close)) if callable(close) else None
        environment = self._episodes.get(which)
        if environment is None:
            raise EpisodeFailed("the process in which it was has ended")
        if do == "reset":
            seed, row = given
            found = await _called(lambda: reset(environment, seed, row))
            observation, info = found if isinstance(found, tuple) else (found, {})
            return [plain(observation), _plain(info)]
        return _plain_step(await _called(lambda: environment.step(given)))


async def _called(work: Callable[[], Any]) -> Any:
    found = await on_daemon_thread(work, "environment")
    return await found if inspect.isawaitable(found) else found


def _plain_step(result: Any) -> object:
    try:
        observation, reward, is_terminated, is_truncated, info = result
        return [plain(observation), reward_number(reward), bool(is_terminated), bool(is_truncated), _plain(info)]
    except (TypeError, ValueError) as error:
        raise EpisodeFailed(f"step must return observation, reward, terminated, truncated, info: {error}") from error


def _plain(info: Info) -> dict[str, Any]:
    """Make JSON of what is used of an info; a state becomes its ``repr``."""
    metrics = info.get("metrics")
    numbers = {
        str(name)[:LONGEST_NAME]: float(value)
        for name, value in (metrics.items() if isinstance(metrics, Mapping) else ())
        if isinstance(value, int | float) and math.isfinite(value)
    }
    plain: dict[str, Any] = {"metrics": dict(list(numbers.items())[:MOST_METRICS])}
    if info.get("instruction"):
        plain["instruction"] = str(info["instruction"])
    if "state" in info:
        plain["state"] = repr(info["state"])
    if "is_valid" in info:
        plain["is_valid"] = bool(info["is_valid"])
    plain |= {name: str(info[name]) for name in ("action", "remembered") if info.get(name) is not None}
    return plain


if __name__ == "__main__":
    serve(CustomCode, is_confined=True)
