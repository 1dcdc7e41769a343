"""Environments behind NeMo Gym's resources servers: a server of the test's own, and one of the real package."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from flotilla.agents.episodes import Episode, EpisodeLost
from flotilla.agents.nemo_gym import ROW, NemoGymAgent, gym_client, rows_of_gym
from flotilla.shared.environment.settings import LOOPBACK
from flotilla.shared.errors import InvalidSpec
from tests.agent_fleet import agent_fleet, play_named, play_rows, served
from tests.fleet import ROOT
from tests.unit.rollout.agents.world import a_spec

COUNT = [
    {
        "type": "function",
        "name": name,
        "description": "",
        "strict": True,
        "parameters": {"type": "object", "properties": {}},
    }
    for name in ("increment_counter", "get_counter_value")
]


def a_row(expected: int, text: str = "add 2") -> dict[str, Any]:
    params = {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": text}],
        "tools": COUNT,
    }
    return {"responses_create_params": params, "expected_count": expected, "initial_count": 3}


def a_counter(asked: list[tuple[str, Any]] | None = None, **broken: int) -> FastAPI:
    """Count in sessions of cookies, as NeMo Gym's ``example_session_state_mgmt`` does; some paths may be broken."""
    app, sessions = FastAPI(), dict[str, int]()

    @app.post("/{path}")
    async def answer(path: str, request: Request, response: Response) -> Any:
        body = await request.json()
        session = request.cookies.get("session") or f"s{len(sessions)}"
        response.set_cookie("session", session)
        if asked is not None:
            asked.append((path, body))
        if path in broken:
            response.status_code = broken[path]
            return {"detail": "broken"}
        if path == "seed_session":
            sessions[session] = body["initial_count"]
            return {}
        if path == "increment_counter":
            sessions[session] += body["count"]
            return {"success": True}
        if path == "verify":
            return {**body, "reward": float(sessions[session] == body["expected_count"]), "count": sessions[session]}
        response.status_code = 404
        return {"detail": "Not Found"}

    return app


def counts(prompt: str) -> str:
    """Add two with the tool, then say so."""
    if "success" in prompt or "Not Found" in prompt or "Invalid tool call" in prompt:
        return "I did.~"
    return '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>~'


def rows_in(path: Path, *rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return list(rows_of_gym(path))


@asynccontextmanager
async def an_agent(app: FastAPI, max_steps: int | None = None) -> AsyncIterator[NemoGymAgent]:
    async with served(app) as url, gym_client(4) as client:
        yield NemoGymAgent(url, client, max_steps)


async def test_sessions_tools_and_verification_of_a_server_make_episodes(tmp_path: Path) -> None:
    asked = list[tuple[str, Any]]()
    rows = rows_in(tmp_path / "data.jsonl", a_row(5), a_row(6))

    async with an_agent(a_counter(asked)) as agent, agent_fleet(a_spec(group_size=2), counts) as fleet:
        rewards = await play_rows(fleet, agent, rows)

    assert rewards == [[1.0, 1.0], [0.0, 0.0]]
    assert [each["role"] for each in rows[0]["prompt"]] == ["system", "user"]
    assert [path for path, _ in asked].count("seed_session") == 4
    response = next(body for path, body in asked if path == "verify")["response"]
    assert [each["type"] for each in response["output"]] == ["function_call", "function_call_output", "message"]
    assert response["output"][1]["output"] == '{"success":true}'


async def test_what_the_policy_calls_wrongly_it_is_told(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "data.jsonl", a_row(3))

    def writes(prompt: str) -> str:
        return counts(prompt).replace("increment_counter", "get_counter_value")

    async with an_agent(a_counter()) as agent, agent_fleet(a_spec(group_size=1), writes) as fleet:
        rewards = await play_rows(fleet, agent, rows)

    assert rewards == [[1.0]]


async def test_max_steps_ends_an_episode_which_is_then_verified(tmp_path: Path) -> None:
    asked = list[tuple[str, Any]]()
    rows = rows_in(tmp_path / "data.jsonl", a_row(5))

    async with an_agent(a_counter(asked), max_steps=1) as agent, agent_fleet(a_spec(group_size=1), counts) as fleet:
        rewards = await play_rows(fleet, agent, rows)

    assert rewards == [[1.0]]
    assert [path for path, _ in asked] == ["seed_session", "increment_counter", "verify"]


async def play_against(app: FastAPI, policy: Mapping[str, Any], row: Any = None, max_steps: int | None = None) -> Any:
    """Play one episode whose policy answers one thing."""
    answers = FastAPI()

    @answers.post("/v1/responses")
    async def respond() -> Mapping[str, Any]:
        return policy

    metadata = {ROW: json.dumps(a_row(3))} if row is None else row
    async with an_agent(app, max_steps) as agent, served(answers) as url:
        return await agent(Episode("e1", "key", f"{url}/v1", "policy", {"metadata": metadata}))


SAYS = {"output": [{"type": "message", "role": "assistant", "content": []}]}
CALLS = {
    "output": [{"type": "function_call", "name": "increment_counter", "call_id": "c", "arguments": '{"count": 1}'}]
}


@pytest.mark.parametrize(("broken", "policy"), [("seed_session", SAYS), ("verify", SAYS), ("increment_counter", CALLS)])
async def test_a_server_that_fails_loses_the_episode_and_is_never_a_zero(broken: str, policy: dict[str, Any]) -> None:
    with pytest.raises(EpisodeLost, match=f"{broken}: 503"):
        await play_against(a_counter(**{broken: 503}), policy)


@pytest.mark.parametrize("status", [408, 429])
async def test_a_server_that_is_busy_loses_the_episode_and_not_all(status: int) -> None:
    with pytest.raises(EpisodeLost, match=f"verify: {status}"):
        await play_against(a_counter(verify=status), SAYS)


async def test_a_server_that_answers_what_is_no_json_loses_the_episode() -> None:
    app = FastAPI()

    @app.post("/{path}")
    async def answer(path: str) -> Response:
        return Response("<html>")

    with pytest.raises(EpisodeLost, match="no JSON: <html>"):
        await play_against(app, SAYS)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("verify", '{"response": {}}', "no tool 'verify'"),
        ("seed_session", '{"initial_count": 3}', "no tool 'seed_session'"),
        ("../admin", "{}", "no tool '../admin'"),
        ("a\nb", "{}", "no tool"),
        ("increment_counter", "[" * 5000, "Invalid tool call arguments"),
        ("increment_counter", '{"count": NaN}', "Invalid tool call arguments"),
        ("increment_counter", '{"count": 1e999}', "Invalid tool call arguments"),
        ("increment_counter", '{"count": "\\ud800"}', "Invalid tool call arguments"),
    ],
)
async def test_the_policy_calls_the_rows_tools_alone_and_ends_nothing_by_what_it_writes(
    name: str, arguments: str, told: str
) -> None:
    asked = list[tuple[str, Any]]()
    call = {"type": "function_call", "name": name, "call_id": "c", "arguments": arguments}

    verdict = await play_against(a_counter(asked), {"output": [call]}, max_steps=1)

    assert [path for path, _ in asked] == ["seed_session", "verify"]
    assert told in asked[1][1]["response"]["output"][1]["output"]
    assert verdict.reward == 1.0


async def test_a_server_that_is_not_there_loses_the_episode() -> None:
    async with gym_client(1) as client:
        agent = NemoGymAgent("http://127.0.0.1:9", client)
        with pytest.raises(EpisodeLost, match="seed_session"):
            await agent(Episode("e1", "key", "http://127.0.0.1:9/v1", "m", {"metadata": {ROW: json.dumps(a_row(3))}}))


async def test_a_server_in_the_operators_networks_is_played_under_its_name(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "data.jsonl", a_row(5), a_row(6))

    async with served(a_counter()) as address, agent_fleet(a_spec(group_size=2), counts) as fleet:
        url = address.replace("127.0.0.1", "localhost")
        async with gym_client(4, url, LOOPBACK) as client:
            rewards = await play_rows(fleet, NemoGymAgent(url, client), rows)
        with pytest.raises(InvalidSpec, match="FLOTILLA_GRADER_NETWORKS"):
            async with gym_client(4, url, ()):
                pass

    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


async def test_a_spec_names_a_server_and_its_agent_is_started_and_ended(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "data.jsonl", a_row(5), a_row(6))

    async with served(a_counter()) as url:
        environment = {"kind": "nemo_gym", "url": url, "parallel": 2}
        async with agent_fleet(a_spec(group_size=2, environment=environment), counts) as fleet:
            rewards = await play_named(fleet, rows)

    assert rewards == [[1.0, 1.0], [0.0, 0.0]]


async def test_the_command_that_is_told_to_end_ends_in_peace() -> None:
    environment = {**os.environ, "FLOTILLA_TOKEN": "t", "FLOTILLA_GATEWAY_URL": "http://127.0.0.1:9"}
    words = ("-m", "flotilla.agents", "nemo-gym", "http://127.0.0.1:9", "experiment")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            # Signals are its own once it plays: the mask of those that it catches says so.
            while not caught(process.pid) & 1 << signal.SIGTERM - 1:
                await asyncio.sleep(0.05)
            process.terminate()
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert (process.returncode, said) == (128 + signal.SIGTERM, b"")


def caught(pid: int) -> int:
    """Read which signals a process catches."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16)


async def test_a_row_that_the_server_does_not_take_or_that_is_of_something_else_ends_all() -> None:
    with pytest.raises(InvalidSpec, match="does not take the row"):
        await play_against(a_counter(seed_session=422), SAYS)
    with pytest.raises(InvalidSpec, match="nemo-gym-rows"):
        await play_against(a_counter(), SAYS, row={"other": 1})


async def test_a_verification_without_a_number_is_no_reward() -> None:
    app = FastAPI()

    @app.post("/{path}")
    async def answer(path: str) -> Any:
        return {"reward": None}

    with pytest.raises(EpisodeLost, match="gave no reward"):
        await play_against(app, SAYS)


async def test_a_number_that_no_float_holds_is_no_metric_and_ends_nothing() -> None:
    app = FastAPI()

    @app.post("/{path}")
    async def answer(path: str) -> Response:
        return Response('{"reward": 1, "large": 1' + "0" * 400 + ', "count": 2, "odd": NaN}')

    verdict = await play_against(app, SAYS)

    assert verdict.metrics == {"count": 2.0, "steps": 1.0}


def test_lines_of_other_content_than_text_are_refused_with_their_number(tmp_path: Path) -> None:
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}

    with pytest.raises(InvalidSpec, match=r"data.jsonl:2.*other content than text"):
        rows_in(tmp_path / "data.jsonl", a_row(3), {"responses_create_params": {"input": [picture]}})
    with pytest.raises(InvalidSpec, match=r"(?s)data.jsonl:1.*responses_create_params"):
        rows_in(tmp_path / "data.jsonl", {"prompt": "p"})


@contextmanager
def a_real_server(*options: str) -> Iterator[str]:
    """Serve a resources server with the real package."""
    python = os.environ.get("FLOTILLA_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("FLOTILLA_NEMO_GYM_PYTHON names no interpreter with nemo-gym: make test-environments makes one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(ROOT / "examples" / "nemo_gym" / "server.py"), "--port", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
async def test_a_server_of_the_real_package_verifies(tmp_path: Path) -> None:
    rows = rows_in(
        tmp_path / "data.jsonl",
        *(
            {"responses_create_params": {"input": f"What is {n} plus 1?"}, "expected_answer": str(n + 1)}
            for n in range(3)
        ),
    )

    def writes(prompt: str) -> str:
        number = int(prompt.rpartition("What is ")[2].split()[0])
        return f"#### {number + 1}~" if number % 2 == 0 else "no idea~"

    with a_real_server() as url:
        async with gym_client(4) as client, agent_fleet(a_spec(group_size=2), writes) as fleet:
            rewards = await play_rows(fleet, NemoGymAgent(url, client), rows)

    assert rewards == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.mark.long
async def test_sessions_and_tools_of_the_real_package_are_played(tmp_path: Path) -> None:
    rows = rows_in(tmp_path / "data.jsonl", a_row(5), a_row(6))
    counter = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"

    with a_real_server("--server", counter) as url:
        async with gym_client(4) as client, agent_fleet(a_spec(group_size=2), counts) as fleet:
            rewards = await play_rows(fleet, NemoGymAgent(url, client), rows)

    assert rewards == [[1.0, 1.0], [0.0, 0.0]]
