"""What every request passes before a route sees it: the token and its scope, the size of the body, the idempotency key.

Everything is refused without a token but the few paths that reveal nothing about experiments, and nothing of a body is
read before its sender is known. How long heads and bodies may take, and how large heads may be, is the connection's.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla.services.gateway.access.caller import caller
from flotilla.services.gateway.access.policy import OPEN_PATHS, experiment_of, refusal
from flotilla.services.gateway.access.tokens import OPERATOR, Shown, Tokens
from flotilla.services.gateway.body_limits import limit_of
from flotilla.services.gateway.store.answers import AwaitedAnswer, awaited
from flotilla.services.gateway.store.base import Store
from flotilla.shared.clock import Clock
from flotilla.shared.concurrency.cancelling import cancelled_with
from flotilla.shared.errors import (
    FlotillaError,
    Forbidden,
    IdempotencyMismatch,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
)
from flotilla.shared.net.authorisation.access import RENEWED_TOKEN
from flotilla.shared.net.authorisation.tokens import TINKER_PREFIX, bearer_of
from flotilla.shared.net.server.connections import connection_of
from flotilla.shared.net.server.gatekeeper import READING, refuse
from flotilla.shared.net.server.model_api_problems import is_anthropic
from flotilla.shared.net.server.request_body import Bodies, BodyBrokenOff, BodyTooLarge, replay

log = logging.getLogger(__name__)

SELF_AUTHORISED = ("/v1/gradings/", "/api/v1/downloads/")
"""What is below them is let in by what the route itself compares, before it asks for a body: graders are not members of
the fleet, and an address that is signed is all that a download shows."""
NEVER_KEPT = re.compile(
    r"/api/v1/.*|"
    r"/v1/(chat/completions|completions|responses|messages(/count_tokens)?)/?|"
    r"/v1/(tokens|services|experiments/[^/]+/episodes|gradings/[^/]*)/?"
)
"""Answers that hold tokens, which no database may: names and processes are unique, and the rollout of an episode knows
by which call it was begun. What the model writes: the episode's rollout knows a request that is sent again. What is
said to whoever has no token: a database is not theirs to fill, and a grading that is sent again is taken again."""
TINKER_API = "/api/v1/"
LONGEST_KEY = 200
LAST_STATUS_KEPT = 499
SUCCESS = 200
A_GRADER = "a grader"

HOW_TO_AUTHORISE = (
    "send a token of the fleet that is neither revoked nor expired as 'Authorization: Bearer TOKEN'; commands and "
    "clients take it from FLOTILLA_TOKEN, or from the file that FLOTILLA_TOKEN_FILE names"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What the guard works with: opened when the app starts."""

    store: Store
    clock: Clock
    tokens: Tokens
    owner_of: Callable[[str], str | None]
    """Of an experiment; None where it has none, or is not there."""


OpenedOf = Callable[[Scope], Opened]


class Guard:
    """ASGI middleware.

    Args:
        app: what it guards.
        opened_of: finds tokens and the store that keeps first answers, in the request's scope.
        bodies: reads bodies, and bounds what they take together.
    """

    def __init__(self, app: ASGIApp, *, opened_of: OpenedOf, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies
        self._opened_of = opened_of
        self._busy: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            connection = connection_of(scope) if scope["method"] in READING else None
            if connection is None:
                await self._handle(scope, receive, send)
                return
            # A read whose client has disconnected is cancelled; a change that has begun is not.
            with cancelled_with(connection.lost, _HungUp()):
                await self._handle(scope, receive, send)
        except _HungUp:
            log.info("a reader hung up before it was answered", extra={"path": scope["path"]})
        except BodyBrokenOff:
            log.info("a request broke off, nothing of it was done", extra={"path": scope["path"]})
        except _Refused as refused:
            await refuse(scope, receive, send, refused.error, is_counted=not refused.is_ours)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        is_self_authorised = scope["path"].startswith(SELF_AUTHORISED)
        if scope["path"] not in OPEN_PATHS and not is_self_authorised:
            shown = self._let_in(scope, headers)
            send = _with_renewal(send, shown.renewed)
        who = caller.get()
        length, limit = headers.get("content-length", "").encode("latin-1"), limit_of(scope["method"], scope["path"])
        with self._bodies.hold(A_GRADER if who is None else who.actor) as held:
            if is_self_authorised:
                await self._app(scope, _when_asked(lambda: held.read(length, receive, limit), receive), send)
                return
            try:
                body = await held.read(length, receive, limit)
            except (BodyTooLarge, Unavailable) as error:
                raise _Refused(error) from None
            await self._let_through(headers.get("idempotency-key"), body, scope, receive, send)

    async def _let_through(self, key: str | None, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        replayed = replay(body, receive)
        if scope["method"] != "POST" or key is None or NEVER_KEPT.fullmatch(scope["path"]):
            await self._app(scope, replayed, send)
            return
        if not 0 < len(key) <= LONGEST_KEY:
            raise _Refused(InvalidRequest(f"Idempotency-Key must have 1 to {LONGEST_KEY} characters"))
        who = caller.get()
        # An answer to one token must not be given to another, nor to a later one of its name.
        shown: Shown | None = scope.get("state", {}).get("shown")
        made = "" if shown is None else shown.digest
        whose = "" if who is None or who == OPERATOR else f"{who.actor} {who.experiment_id} {who.subject} {made} "
        full_key = f"{whose}{scope['path']} {key}"
        if len(full_key) > 2 * LONGEST_KEY:
            full_key = hashlib.sha256(full_key.encode()).hexdigest()
        async with self._alone(full_key):
            await self._once(full_key, body, scope, replayed, send)

    def _let_in(self, scope: Scope, headers: MutableMapping[str, str]) -> Shown:
        tokens, token = self._opened_of(scope).tokens, _token_of(scope["path"], headers)
        shown = tokens.read(token)
        if shown is None:
            raise _Refused(Unauthorized(HOW_TO_AUTHORISE), is_ours=tokens.is_ours(token))
        reason = refusal(scope["method"], scope["path"], shown.principal)
        if reason is not None:
            raise _Refused(Forbidden(reason))
        experiment_id, owner = experiment_of(scope["path"]), shown.principal.owner
        if owner is not None and experiment_id is not None:
            self._check_owner(scope, experiment_id, owner)
        scope["state"]["shown"] = shown
        # Each request is handled in a context of its own.
        caller.set(shown.principal)
        return shown

    def _check_owner(self, scope: Scope, experiment_id: str, owner: str) -> None:
        """Answer requests for another owner's experiment as if there were none: ids reveal what others work on."""
        if self._opened_of(scope).owner_of(experiment_id) != owner:
            detail = f"there is no experiment {experiment_id} of the owner {owner}"
            raise _Refused(NotFound(detail, experiment_id=experiment_id), is_ours=True)

    async def _once(self, key: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        opened = self._opened_of(scope)
        store, clock = opened.store, opened.clock
        digest = hashlib.sha256(body + scope["query_string"]).hexdigest()
        try:
            known = await store.answer(key)
        except FlotillaError as error:
            raise _Refused(error) from None
        if known is not None:
            if known.body_digest != digest:
                detail = "this Idempotency-Key came with another body before: use a new key for a new request"
                raise _Refused(IdempotencyMismatch(detail))
            await _send(send, known.status, known.content_type, known.body.encode())
            return
        answer = _Answer()
        expected = AwaitedAnswer(key, digest, lambda: scope["route"].status_code or SUCCESS, clock.now)
        token = awaited.set(expected)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            awaited.reset(token)
        if answer.status <= LAST_STATUS_KEPT and not expected.is_stored:
            # A refusal, or an answer to what changed nothing: a repetition that is answered again does no harm.
            try:
                await store.put_answer(expected.of(answer.status, answer.content_type, answer.body.decode()))
            except FlotillaError as error:
                log.warning("answer to an idempotency key was not stored", extra={"error": repr(error)})
        await answer.pass_on(send)

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        """Let one request with this key through at a time."""
        lock = self._busy.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._busy[key]


class _HungUp(Exception):
    """The caller went before it was answered."""


class _Refused(Exception):
    """Ends a request with a problem.

    Args:
        error: the problem.
        is_ours: whether the token is of this fleet all the same.
    """

    def __init__(self, error: FlotillaError, *, is_ours: bool = False) -> None:
        super().__init__(error.detail)
        self.error = error
        self.is_ours = is_ours


class _Answer:
    """Holds back a response until it is stored."""

    def __init__(self) -> None:
        self.status = 500
        self.content_type = ""
        self.body = b""
        self._messages: list[Message] = []

    async def send(self, message: Message) -> None:
        """Take one message of the response."""
        self._messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            self.content_type = headers.get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    async def pass_on(self, send: Send) -> None:
        """Send what was held back."""
        for message in self._messages:
            await send(message)


def _token_of(path: str, headers: Mapping[str, str]) -> str | None:
    """Find the token: clients of Tinker and Anthropic have a header of their own, Tinker's with a prefix before it."""
    key, bearer = headers.get("x-api-key"), bearer_of(headers.get("authorization"))
    if path.startswith(TINKER_API) and key is not None:
        return key.removeprefix(TINKER_PREFIX) or None
    return bearer or key or None if is_anthropic(path) else bearer


def _when_asked(read: Callable[[], Awaitable[bytes]], receive: Receive) -> Receive:
    """Read a body when the app first asks for it."""
    given: Receive | None = None

    async def asked() -> Message:
        nonlocal given
        if given is None:
            given = replay(await read(), receive)
        return await given()

    return asked


def _with_renewal(send: Send, renewed: str | None) -> Send:
    """Add the caller's next pass to an answer."""
    if renewed is None:
        return send
    header = (RENEWED_TOKEN.lower().encode(), renewed.encode())

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return adding


async def _send(send: Callable[[Message], Awaitable[None]], status: int, content_type: str, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    if content_type:
        headers.append((b"content-type", content_type.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
