"""What the gateway adds to a request of an agent, beside asking the rollout directly.

    python -m benchmarks.agents [--episodes 64] [--turns 12] [--reply-seconds 0.5]

Client, gateway and rollout are a process each. The rollout's engine is scripted: a reply takes the given time and no
processor. Each episode is one conversation whose turns go directly and through the gateway in turn, so that both ways
see the same load at the same time; the conversations begin at times spread over one reply, since agents do not ask in
step. The differences are what the gateway costs.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil
from fastapi import FastAPI

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.agents.routes import episodes_router
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.clock import SystemClock
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.net.server.serving import add_problem_handlers
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.keys import HopName
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.builders import a_task
from flotilla.shared.testing.characters import END, CharacterTokenizer
from tests.agent_fleet import EXPERIMENT, TOKEN, served
from tests.unit.gateway.builders import a_gateway, a_record, a_registration, say
from tests.unit.rollout.agents.world import a_spec, engine_that

REPLY = "a reply of twenty-five tok~"
SERVICE = "rollout-1"


def spec_of(turns: int) -> ExperimentSpec:
    """Make the spec of conversations of so many turns."""
    return a_spec(group_size=8, max_turns=turns + 1, max_branches=2, lease_seconds=600)


async def serve_rollout(arguments: argparse.Namespace) -> None:
    """Be the rollout; print its address."""
    plane, spec = MemoryDataPlane(), spec_of(arguments.turns)
    engine = engine_that(lambda _: REPLY, slots=1024, token_seconds=arguments.reply_seconds / len(REPLY))
    template = ChatTemplate(ChatRenderer(CharacterTokenizer(), (END,)))
    prefix = lambda: f"{EXPERIMENT}.{arguments.service}"  # noqa: E731
    episodes = AgentEpisodes(engine, template, spec, plane.mailbox, prefix)
    gate = VersionGate()
    consumer = RolloutConsumer(
        [(LaneConfig("train", 1024, None), plane.hop(HopName.TASKS, "r"))], episodes, gate, lambda _: None
    )
    app = FastAPI()
    add_problem_handlers(app)
    app.include_router(episodes_router(lambda *_: episodes, lambda _: True))
    await plane.admission.issue_many(
        [a_task(n, group_size=8) for n in range(-(-arguments.episodes // 8))], limit=10_000
    )
    await engine.start()
    await gate.set(0)
    consumer.resume()
    async with served(app) as address, asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run())
        print(address, flush=True)


async def serve_gateway(arguments: argparse.Namespace) -> None:
    """Be the gateway, with the one rollout; print its address and the rollout's id."""
    spec = spec_of(arguments.turns)
    gateway = a_gateway(clock=SystemClock(), token=TOKEN)
    record = a_record(EXPERIMENT, spec=spec.model_dump(mode="json"), state=ExperimentState.RUNNING)
    await gateway.repository.add(record, spec)
    registration = a_registration(ServiceKind.ROLLOUT, "r", address=arguments.rollout)
    service_id = (await gateway.fleet.register(registration)).service_id
    await gateway.registry.assign(gateway.registry.get(service_id), EXPERIMENT)
    await say(gateway, service_id, ObservedState(experiment_id=EXPERIMENT, state=WorkState.RUNNING, policy_version=0))
    app = create_app(GatewaySettings(token=TOKEN, redis_url="redis://nowhere", data=gateway.settings.data))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway}}, receive, send)

    # The rollout was started first, and names its episodes after a service id of its own choice.
    gateway.registry._services[arguments.service] = gateway.registry.get(service_id)
    async with served(with_state) as address:  # type: ignore[arg-type]
        print(address, flush=True)
        await asyncio.Event().wait()


class Agents:
    """The client's side: conversations, and how long each of their turns took."""

    def __init__(self, rollout: str, gateway: str, arguments: argparse.Namespace) -> None:
        self._rollout, self._gateway, self._turns = rollout, gateway, arguments.turns
        self._apart_seconds = arguments.reply_seconds / arguments.episodes
        self.seconds: dict[str, list[float]] = {"direct": [], "gateway": []}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self.http = httpx.AsyncClient(trust_env=False, timeout=60, limits=limits)

    async def converse(self, number: int) -> None:
        """Hold one conversation."""
        opened = await self.http.post(
            f"{self._gateway}/v1/experiments/{EXPERIMENT}/episodes",
            json={"wait_seconds": 20},
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        episode = opened.raise_for_status().json()
        headers = {"Authorization": f"Bearer {episode['key']}", "Content-Type": "application/json"}
        await asyncio.sleep(number * self._apart_seconds)
        direct = f"{self._rollout}/v1/experiments/{EXPERIMENT}/episodes/{episode['episode_id']}/chat"
        chat = [{"role": "user", "content": "?"}]
        for turn in range(self._turns):
            way, url = [("direct", direct), ("gateway", f"{self._gateway}/v1/chat/completions")][(turn + number) % 2]
            body = json.dumps({"messages": chat})
            began = time.perf_counter()
            answer = await self.http.post(url, content=body, headers=headers)
            took = time.perf_counter() - began
            if turn > 1:  # connections are open
                self.seconds[way].append(took)
            chat += [answer.raise_for_status().json()["choices"][0]["message"], {"role": "user", "content": "more?"}]


def start(*words: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a part in a process of its own; return it and the address that it prints."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.agents", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all three and compare."""
    same = ["--episodes", str(arguments.episodes), "--turns", str(arguments.turns), "--service", SERVICE]
    rollout, rollout_url = start("rollout", "--reply-seconds", str(arguments.reply_seconds), *same)
    gateway, gateway_url = start("gateway", "--rollout", rollout_url, *same)
    agents = Agents(rollout_url, gateway_url, arguments)
    try:
        before = psutil.Process(gateway.pid).cpu_times()
        async with agents.http:
            await asyncio.gather(*(agents.converse(number) for number in range(arguments.episodes)))
        after = psutil.Process(gateway.pid).cpu_times()
    finally:
        for process in (gateway, rollout):
            process.terminate()
            process.wait(timeout=10)
    direct, through = agents.seconds["direct"], agents.seconds["gateway"]
    used = after.user + after.system - before.user - before.system
    return {
        "episodes": arguments.episodes,
        "requests": len(direct) + len(through),
        "load_average": os.getloadavg()[0],
        "direct_p50_ms": 1000 * statistics.median(direct),
        "gateway_p50_ms": 1000 * statistics.median(through),
        "overhead_p50_ms": 1000 * (statistics.median(through) - statistics.median(direct)),
        "overhead_p90_ms": 1000 * (statistics.quantiles(through, n=10)[-1] - statistics.quantiles(direct, n=10)[-1]),
        "gateway_cpu_ms_per_request": 1000 * used / (arguments.episodes * arguments.turns / 2),
    }


def main() -> None:
    """Measure, or be one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["rollout", "gateway"], help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--reply-seconds", type=float, default=0.5)
    parser.add_argument("--rollout", help=argparse.SUPPRESS)
    parser.add_argument("--service", default=SERVICE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "rollout":
        asyncio.run(serve_rollout(arguments))
    elif arguments.part == "gateway":
        asyncio.run(serve_gateway(arguments))
    else:
        print(json.dumps(asyncio.run(measure(arguments)), indent=2))


if __name__ == "__main__":
    main()
