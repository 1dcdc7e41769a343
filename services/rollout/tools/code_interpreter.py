"""An interpreter or a shell in the sandbox as a tool: what one call leaves is there for the next one of the episode.

The session is made at the first call. The program's errors are its result, which the policy receives. What the
sandbox does not do (no place, no connection, an error of its own) is an error of the episode. The code that grades an
episode runs in the same session, before that is closed: what the policy left there is what is graded.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx
from pydantic import ValidationError

from flotilla.services.rollout.tools.base import Schema, ToolFailed
from flotilla.shared.config.sections.episodes import CodeInterpreterConfig
from flotilla.shared.errors import EpisodeFailed, FlotillaError
from flotilla.shared.schemas.sandbox import (
    EXPERIMENT_HEADER,
    CellRequest,
    CellResponse,
    RunStatus,
    SessionRequest,
    SessionView,
    is_image,
)
from flotilla.shared.schemas.task import Task

DESCRIPTIONS: Final = {
    "python": "Run Python code and return what it prints. Names that it defines are there for later calls.",
    "shell": "Run shell commands and return what they print. Files that they write are there for later calls.",
}
SOURCES: Final = {"python": "Python source text.", "shell": "Shell commands."}
QUEUE_SECONDS: Final = 165.0
"""For a place in the sandbox, whose own queue times out after 30 s, and for a provider's box."""
EXTENSION_SECONDS: Final = 60.0
"""How much longer a cell may take on a busy machine: the sandbox does not count what it waits for a processor."""
CLOSE_SECONDS: Final = 5.0
LOST: Final = "the interpreter was started again: what earlier calls defined is lost"
ENDED: Final = 410
Answer = TypeVar("Answer", CellResponse, SessionView)


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """How a sandbox is reached.

    Attributes:
        address: finds a present one; raises ``Unavailable`` if there is none.
        token: that it lets in.
        experiment: whose sessions these are; they wait for each other's turns.
    """

    address: Callable[[], Awaitable[str]]
    token: Callable[[], str]
    experiment: str = ""


@dataclass(frozen=True, slots=True)
class _Open:
    """A session: where it is, and what its calls show."""

    url: str
    headers: Mapping[str, str]


class CodeInterpreter:
    """The tool of a spec, which each episode has a session of."""

    def __init__(self, config: CodeInterpreterConfig, sandboxes: Sandboxes, client: httpx.AsyncClient) -> None:
        self._config, self._sandboxes, self._client = config, sandboxes, client
        self.schema: Schema = {
            "type": "function",
            "function": {
                "name": config.name,
                "description": config.description or DESCRIPTIONS[config.language],
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": SOURCES[config.language]}},
                    "required": ["code"],
                },
            },
        }

    def for_episode(self, task: Task) -> "InterpreterSession":
        """Make that of one episode."""
        return InterpreterSession(self._config, self.schema, self._sandboxes, self._client, task)


class InterpreterSession:
    """The interpreter of one episode; calls wait for each other."""

    def __init__(
        self, config: CodeInterpreterConfig, schema: Schema, sandboxes: Sandboxes, client: httpx.AsyncClient, task: Task
    ) -> None:
        self.schema = schema
        self._task = task
        self._config, self._sandboxes, self._client = config, sandboxes, client
        self._session: _Open | None = None
        self._turn = asyncio.Lock()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the code; see ``Tool.call``."""
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolFailed('give "code", a text, and nothing else')
        async with self._turn:
            return await self._run(code)

    async def check(self) -> float | None:
        """Grade what the episode leaves, by the code of its row; see ``Checked.check``."""
        if self._config.check_column is None:
            return None
        code = self._of_row(self._config.check_column, "check_column")
        async with self._turn:
            reply = await self._cell(code, self._config.check_seconds)
            if reply.status_code == ENDED:
                raise EpisodeFailed(f"the sandbox ended before it was graded: {_detail(reply)}")
            response = _read(CellResponse, reply)
        if response.status is RunStatus.SANDBOX_ERROR:
            raise EpisodeFailed(f"the sandbox failed while it was graded: {response.message}")
        return float(response.status is RunStatus.SUCCESS)

    def _of_row(self, column: str, key: str) -> str:
        """Read a text of the task's row.

        Raises:
            EpisodeFailed: there is none.
        """
        found = self._task.metadata.get(column)
        if not isinstance(found, str) or not found:
            raise EpisodeFailed(f"the row has no text in {column!r}, which {key} of the code interpreter names")
        return found

    async def _cell(self, code: str, run_seconds: float) -> httpx.Response:
        session = self._session or await self._start()
        cell = CellRequest(code=code, run_timeout=run_seconds)
        body = cell.model_dump(mode="json", exclude={"files"})
        return await self._post(f"{session.url}/run", session.headers, body, run_seconds + EXTENSION_SECONDS)

    async def _run(self, code: str) -> str:
        reply = await self._cell(code, self._config.run_seconds)
        if reply.status_code == ENDED:
            # Idle for too long, or out of its processor time: another one takes its place.
            self._session = None
            raise ToolFailed(f"{LOST}. {_detail(reply)}")
        response = _read(CellResponse, reply)
        if response.status is RunStatus.SANDBOX_ERROR:
            raise EpisodeFailed(f"the sandbox could not run a cell: {response.message}")
        if not response.is_alive:
            self._session = None
        result = response.run_result
        parts = [response.message, (result and result.stdout) or "", (result and result.stderr) or ""]
        text = "\n".join(part.strip("\n") for part in parts if part.strip())
        if response.status is not RunStatus.SUCCESS:
            raise ToolFailed(text if response.is_alive else f"{text}\n{LOST}")
        return text

    async def _start(self) -> _Open:
        try:
            address = (await self._sandboxes.address()).rstrip("/")
        except FlotillaError as error:
            raise EpisodeFailed(f"there is no sandbox for the code interpreter: {error.detail}") from error
        authorization = {"Authorization": f"Bearer {self._sandboxes.token()}"}
        if self._sandboxes.experiment:
            authorization[EXPERIMENT_HEADER] = self._sandboxes.experiment
        column = self._config.image_column
        image = None if column is None else self._of_row(column, "image_column")
        if image is not None and not is_image(image):
            raise EpisodeFailed(f"the row names no image in {column!r}, but {image[:100]!r}")
        request = SessionRequest(
            language=self._config.language,
            image=image,
            memory_limit_MB=self._config.memory_megabytes or -1,
            cpu_seconds=self._config.cpu_seconds,
            idle_seconds=self._config.idle_seconds,
        )
        body = request.model_dump(mode="json", exclude={"image"} if image is None else None)
        reply = await self._post(f"{address}/sessions", authorization, body, QUEUE_SECONDS)
        view = _read(SessionView, reply)
        self._session = _Open(f"{address}/sessions/{view.id}", {**authorization, "Session-Token": view.token})
        return self._session

    async def _post(self, url: str, headers: Mapping[str, str], body: Any, seconds: float) -> httpx.Response:
        try:
            return await self._client.post(url, headers=dict(headers), json=body, timeout=seconds)
        except httpx.HTTPError as error:
            raise EpisodeFailed(f"the sandbox cannot be reached: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the session; a lost sandbox has ended it."""
        session, self._session = self._session, None
        if session is None:
            return
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._client.delete(session.url, headers=dict(session.headers))


def _read(kind: type[Answer], reply: httpx.Response) -> Answer:
    if reply.status_code >= 300:
        raise EpisodeFailed(f"the sandbox answered {reply.status_code}: {_detail(reply)}")
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError as error:
        raise EpisodeFailed(f"the sandbox answered what is no {kind.__name__}") from error


def _detail(reply: httpx.Response) -> str:
    try:
        found = reply.json()
    except ValueError:
        found = None
    return str(found.get("detail", "") if isinstance(found, dict) else reply.text)[:500]
