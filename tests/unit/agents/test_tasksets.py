"""What an episode of verifiers 0.4 comes to: a reward, or none, and never a zero for what failed beside the policy."""

import contextlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from flotilla.agents.episodes import Episode, EpisodeLost, Verdict
from flotilla.agents.tasksets import KEY, TASK, TasksetAgent, has_tasksets, serving
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.bearer_client import tls_context


class Data:
    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_validate_json(cls, text: str) -> "Data":
        return cls(text)


class Task:
    def __init__(self, data: Data, config: object) -> None:
        self.data = data

    @classmethod
    def data_type(cls) -> type[Data]:
        return Data


class Tasks:
    config = SimpleNamespace(task=None)

    @classmethod
    def task_type(cls) -> type[Task]:
        return Task


def a_trace(*rewards: float | None, trainable: bool = True, **fields: Any) -> SimpleNamespace:
    named = {str(number): value for number, value in enumerate(rewards)}
    total = sum(value for value in rewards if value is not None)
    found = {
        "rewards": named,
        "reward": total,
        "metrics": {"words": 3, "unknown": None},
        "errors": [],
        "is_timeout": False,
    }
    return SimpleNamespace(agent=SimpleNamespace(trainable=trainable), **(found | fields))


class Environment:
    """Gives one result, and looks at the client it is given."""

    taskset = Tasks()

    def __init__(self, traces: Sequence[Any], *, ok: bool = True, errors: Sequence[Any] = ()) -> None:
        self.result = SimpleNamespace(traces=traces, ok=ok, errors=errors)
        self.keys: list[str] = []

    async def run_episode(self, task: Task, context: Any) -> Any:
        self.keys.append(os.environ[context.client.api_key_var])
        return self.result


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the package's clients."""
    clients = ModuleType("verifiers.v1.clients")
    clients.EvalClientConfig = SimpleNamespace  # type: ignore[attr-defined]
    clients.ModelContext = lambda model, client: SimpleNamespace(model=model, client=client)  # type: ignore[attr-defined]
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", clients)


def an_episode(metadata: dict[str, Any] | None = None) -> Episode:
    given = {TASK: "{}"} if metadata is None else metadata
    return Episode("e-1.x", "the-key", "http://127.0.0.1:9/v1", "policy", {"metadata": given})


async def test_the_traces_rewards_are_the_episodes_and_its_key_is_named_no_longer() -> None:
    environment = Environment([a_trace(0.5, 0.25), a_trace(9.0, trainable=False), a_trace(0.0, is_timeout=True)])

    verdict = await TasksetAgent(environment)(an_episode())

    assert verdict == Verdict(0.375, {"words": 3.0, "timed_out": 1.0})
    assert environment.keys == ["the-key"]
    assert [name for name in os.environ if name.startswith(KEY)] == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (Environment([a_trace(1.0)], ok=False, errors=[SimpleNamespace(type="E", message="down")]), "E: down"),
        (Environment([a_trace(0.0, errors=[SimpleNamespace(type="P", message="503")])], ok=False), "P: 503"),
        (Environment([a_trace(1.0, None)]), "not computed"),
        (Environment([]), "no trace"),
    ],
)
async def test_what_failed_is_lost(environment: Environment, reason: str) -> None:
    with pytest.raises(EpisodeLost, match=reason):
        await TasksetAgent(environment)(an_episode())

    assert [name for name in os.environ if name.startswith(KEY)] == []


async def test_a_row_without_a_task_ends_all() -> None:
    with pytest.raises(InvalidSpec, match="verifiers-rows"):
        await TasksetAgent(Environment([a_trace(1.0)]))(an_episode({"example_id": 1}))


@pytest.mark.parametrize("has_environments", [True, False])
def test_which_of_both_is_installed_is_seen(monkeypatch: pytest.MonkeyPatch, has_environments: bool) -> None:
    package = ModuleType("verifiers")
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    if has_environments:
        package.load_environment = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)

    assert has_tasksets() is not has_environments


async def test_the_relays_of_all_episodes_read_the_authorities_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.base")
    package = {name: ModuleType(name) for name in (*names, "verifiers.v1.clients.eval")}
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    relayed = package["verifiers.v1.clients.eval"]
    vars(package["verifiers.v1.clients"])["eval"] = relayed
    vars(package["verifiers.v1.clients.base"])["DEFAULT_LIMITS"] = httpx.Limits(max_connections=7)
    config = SimpleNamespace(timeout=SimpleNamespace(model_dump=lambda: {"timeout": 9.0}))
    environment = SimpleNamespace(serving=contextlib.nullcontext, taskset=Tasks())

    async with serving(environment):
        clients = [vars(relayed)["build_async_httpx"](config) for _ in range(2)]

    pools = [each._transport._pool for each in clients]
    assert [each.timeout for each in clients] == [httpx.Timeout(9.0)] * 2
    assert [each._ssl_context for each in pools] == [tls_context()] * 2
    assert [each._max_connections for each in pools] == [7, 7]
