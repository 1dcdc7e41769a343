"""Environments of the `verifiers` package before 0.2, unchanged: each episode is one of their rollouts.

The package is not ours and not a dependency: run this with the interpreter that has it, and the environment, installed.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.agents.episodes import Episode, EpisodeLost, Verdict
from flotilla.shared.environment.settings import gateway_urls
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.task import Lane

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ROW = "example_id"
"""Column of an environment's dataset that numbers its rows."""


def load_environment(name: str, options: Mapping[str, Any]) -> Any:
    """Load an environment: an installed one by its id, or a file with ``load_environment``.

    Raises:
        InvalidSpec: there is no such file, or verifiers is not installed.
        Exception: whatever the environment's code raises.
    """
    try:
        import verifiers
    except ImportError as error:
        needed = "this needs the package verifiers ('verifiers==0.4.0' for tasksets, 'verifiers<0.2' for environments)"
        raise InvalidSpec(f"{needed}: {error}") from error
    if not name.endswith(".py"):
        return verifiers.load_environment(name, **options)
    spec = importlib.util.spec_from_file_location("verifiers_environment_file", name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise InvalidSpec(f"there is no Python file {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load_environment(**options)


def dataset_of(environment: Any, lane: Lane) -> Any:
    """Return the rows for training, or those that are held out; an environment without any gives the former again."""
    return environment.get_dataset() if lane is Lane.TRAIN else environment.get_eval_dataset()


def rows_of(environment: Any, lane: Lane = Lane.TRAIN) -> Iterator[dict[str, Any]]:
    """Make the experiment's rows of the environment's: prompt, answer and number."""
    for row in dataset_of(environment, lane):
        prompt = row["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        plain = [{"role": each["role"], "content": str(each["content"])} for each in messages]
        yield {"prompt": plain, "answer": str(row.get("answer", "")), ROW: row[ROW]}


def new_client(gateway: str) -> "AsyncOpenAI":
    """Make the client whose connections all episodes share; each sends the key of its own."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    connections = DefaultAsyncHttpxClient(verify=tls_context())
    # Each episode has the address of the gateway that handed it out.
    return AsyncOpenAI(base_url=gateway_urls(gateway)[0], api_key="of each episode", http_client=connections)


class VerifiersAgent:
    """Plays episodes as rollouts of one environment, with its own rubric's reward.

    Args:
        environment: as ``load_environment`` made it.
        client: see ``new_client``.
    """

    def __init__(self, environment: Any, client: "AsyncOpenAI") -> None:
        self._environment = environment
        self._client = client
        self._rows = {Lane.TRAIN: _numbered(environment, Lane.TRAIN)}

    async def __call__(self, episode: Episode) -> Verdict:
        """Play one episode.

        Raises:
            EpisodeLost: the rollout failed, so that it has no reward.
            KeyError: the task is of another dataset.
        """
        from verifiers.clients import OpenAIChatCompletionsClient

        row = self.row_of(episode.task)
        client = OpenAIChatCompletionsClient(self._client.with_options(base_url=episode.base_url, api_key=episode.key))
        output = await self._environment.run_rollout(row, client, episode.model, sampling_args={})
        if output.get("error") or output.get("reward") is None:
            raise EpisodeLost(str(output.get("error") or "the rollout has no reward"))
        told = dict(output.get("metrics") or {}).items()
        metrics = {str(name): float(value) for name, value in told if isinstance(value, int | float)}
        return Verdict(float(output["reward"]), metrics)

    def row_of(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Find the environment's row of a task, among those of its split."""
        lane = Lane(task["split"])
        if lane not in self._rows:
            self._rows[lane] = _numbered(self._environment, lane)
        return self._rows[lane][task["metadata"][ROW]]


def _numbered(environment: Any, lane: Lane) -> dict[Any, dict[str, Any]]:
    return {row[ROW]: dict(row) for row in dataset_of(environment, lane)}
