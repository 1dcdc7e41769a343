"""Environments of NeMo Gym behind their resources servers: sessions, tools and verification over plain HTTP.

What NeMo Gym's own ``simple_agent`` does, with the episode's ``/v1/responses`` as the model: the server and its
packages are the user's, and nothing of them is imported here.

Source: NeMo Gym 0.4, ``responses_api_agents/simple_agent/app.py`` and ``nemo_gym/base_resources_server.py``.
"""

import http.cookiejar
import json
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field, ValidationError

from flotilla.agents.episodes import REQUEST_SECONDS, Episode, EpisodeLost, Verdict
from flotilla.agents.policy import ask_policy
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.checked_transport import CheckedAddresses, checked_address
from flotilla.shared.schemas.wire import TolerantWire

ROW = "nemo_gym"
"""Column of the rows that has the line of NeMo Gym's data, as JSON: a server reads any of its fields."""
MOST_BYTES = 64 << 20
"""Of an answer of a server that is searched for in networks: it repeats all that was said."""
PARTS = ("input_text", "output_text", "text")
LATER = frozenset({408, 425, 429})
"""Statuses that are not the row's fault."""


class _Params(TolerantWire):
    """What a row asks the model, without what the spec says: model and sampling."""

    input: str | tuple[dict[str, Any], ...]
    instructions: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool | None = None

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else list(self.input)

    @property
    def names(self) -> set[Any]:
        """Names of the tools."""
        return {each.get("name") for each in self.tools}


class _Row(TolerantWire):
    responses_create_params: _Params


class _Item(TolerantWire):
    """One item of a response."""

    type: str
    name: str = ""
    call_id: str = ""
    arguments: str = ""


class _Response(TolerantWire):
    output: tuple[dict[str, Any], ...]
    incomplete_details: object = None

    @property
    def calls(self) -> list[_Item]:
        """Which tools are called."""
        items = [_Item.model_validate(each) for each in self.output]
        return [item for item in items if item.type == "function_call"]


class _Verified(TolerantWire):
    reward: float = Field(allow_inf_nan=False)


def rows_of_gym(source: Path) -> Iterator[dict[str, Any]]:
    """Make the experiment's rows of a file of NeMo Gym's: the prompt, and the line itself.

    Raises:
        InvalidSpec: a line is none of these, or has other content than text.
    """
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            params = _Row.model_validate_json(line).responses_create_params
            said = [{"role": "system", "content": params.instructions}] if params.instructions else []
            yield {"prompt": said + [_message(each) for each in params.items], ROW: line}
        except (ValidationError, ValueError) as error:
            raise InvalidSpec(f"{source}:{number}: {error}") from error


def _message(item: Mapping[str, Any]) -> dict[str, str]:
    content, role = item.get("content"), str(item.get("role"))
    if isinstance(content, list) and all(part.get("type") in PARTS for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"an item of type {item.get('type', 'message')} that has other content than text")  # noqa: TRY004
    return {"role": "system" if role == "developer" else role, "content": content}


class NemoGymAgent:
    """Plays episodes with a resources server.

    Args:
        url: of the server.
        client: for it and the policy; it keeps no cookies, since each episode has its own.
        max_steps: answers of one episode at most; None: as many as the spec lets it have.
    """

    def __init__(self, url: str, client: httpx.AsyncClient, max_steps: int | None = None) -> None:
        self._url, self._client, self._max_steps = url.rstrip("/"), client, max_steps

    async def __call__(self, episode: Episode) -> Verdict:
        """Play one episode.

        Raises:
            EpisodeLost: server or policy failed, or cannot be reached.
            InvalidSpec: the row is not of NeMo Gym, or not of this server.
        """
        line = episode.task["metadata"].get(ROW)
        if not isinstance(line, str):
            raise InvalidSpec(f"the rows have no column {ROW}: nemo-gym-rows writes it")
        row = json.loads(line)
        params = _Row.model_validate(row).responses_create_params
        session = _Session(self._url, self._client, params.names)
        await session.must("seed_session", row)
        response, outputs, steps = None, list[Any](), 0
        while self._max_steps is None or steps < self._max_steps:
            body = params.model_dump(exclude_none=True) | {"input": params.items + outputs, "model": episode.model}
            answer = await ask_policy(self._client, episode, "responses", body, is_first=steps == 0)
            if answer is None:
                break
            steps, response, read = steps + 1, answer, _Response.model_validate(answer)
            outputs += read.output
            if read.incomplete_details or not read.calls:
                break
            for call in read.calls:
                said = await session.call(call)
                outputs.append({"type": "function_call_output", "call_id": call.call_id, "output": said})
        assert response is not None, "the first answer is there, or the episode is lost"
        verified = await session.must("verify", row | {"response": response | {"output": outputs}})
        try:
            reward = _Verified.model_validate(verified).reward
        except ValidationError as error:
            raise EpisodeLost(f"{self._url}/verify gave no reward: {error}") from error
        return Verdict(reward, _metrics(verified, row) | {"steps": float(steps)})


def _metrics(verified: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """Take what the server measured: numbers beside the reward that the row did not have."""
    told = {name: value for name, value in verified.items() if name not in row and name != "reward"}
    return {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }


class _Session:
    """One episode's session: the cookies that the server gave.

    Args:
        url: of the server.
        client: for it.
        tools: which of the server's paths the policy may call: not those that seed and verify.
    """

    def __init__(self, url: str, client: httpx.AsyncClient, tools: Collection[Any]) -> None:
        self._url, self._client, self._tools = url, client, tools
        self._cookies = httpx.Cookies()

    async def must(self, path: str, body: Any) -> Any:
        """Post what the server must be able to do.

        Raises:
            EpisodeLost: it failed.
            InvalidSpec: it does not take the row.
        """
        answer = await self._post(path, body)
        if answer.status_code in LATER:
            raise EpisodeLost(f"{self._url}/{path}: {answer.status_code}: {answer.text[:500]}")
        if 400 <= answer.status_code < 500:
            raise InvalidSpec(f"{self._url}/{path} does not take the row ({answer.status_code}): {answer.text[:500]}")
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise EpisodeLost(f"{self._url}/{path} answered what is no JSON: {answer.text[:200]}") from error

    async def call(self, item: _Item) -> str:
        """Call a tool; the policy receives its own errors as the result.

        Raises:
            EpisodeLost: the server failed.
        """
        if item.name not in self._tools:
            return json.dumps({"error": f"There is no tool {item.name[:100]!r}"})
        try:
            arguments = json.loads(item.arguments)
            # Python reads more than JSON is: what cannot be sent is the policy's error, too.
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        return (await self._post(item.name, arguments)).text

    async def _post(self, path: str, body: Any) -> httpx.Response:
        request = self._client.build_request("POST", f"{self._url}/{path}", json=body, timeout=REQUEST_SECONDS)
        self._cookies.set_cookie_header(request)
        asked = request.url
        try:
            answer = await self._client.send(request)
        except httpx.HTTPError as error:
            raise EpisodeLost(f"{self._url}/{path}: {error!r}") from error
        request.url = asked  # by which cookies are kept; what was connected to may be an address
        self._cookies.extract_cookies(answer)
        if answer.status_code >= 500:
            raise EpisodeLost(f"{self._url}/{path}: {answer.status_code}: {answer.text[:500]}")
        return answer


@asynccontextmanager
async def gym_client(
    parallel: int, url: str = "", networks: Sequence[IPNetwork] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Open the client whose connections all episodes share, and which keeps no cookies.

    Args:
        parallel: episodes at a time.
        url: of the server.
        networks: that are not public, and that the server may be in; None: it may be anywhere.

    Raises:
        InvalidSpec: it is elsewhere.
    """
    limits = httpx.Limits(max_connections=2 * parallel)
    mounts: dict[str, httpx.AsyncBaseTransport] = {}
    if networks is not None:
        parts = httpx.URL(url)
        try:
            await checked_address(parts, networks)
        except PermissionError as error:
            raise InvalidSpec(f"{url} cannot be played with: {error}") from error
        except OSError:
            pass  # the host name does not resolve now: each episode reports it
        mounts[f"{parts.scheme}://{parts.netloc.decode()}"] = CheckedAddresses(
            networks, max_answer_bytes=MOST_BYTES, limits=limits
        )
    async with httpx.AsyncClient(limits=limits, verify=tls_context(), mounts=mounts) as client:
        client.cookies.jar.set_policy(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
        yield client
