"""A service's side of the fleet: register, keep the lease, learn what to do.

Two calls take turns. The *poll* waits at the gateway until the desired state changes, and so keeps the lease; the
*push* sends an observation at once when something worth telling happened. Either answer is the whole desired state,
so it does not matter which arrives. One that another overtook is older than what was applied: it is asked for again.

What a service does for a new desired state, such as to map a version's image, it has often done a moment later: the
next poll waits so long for it and takes it along, in place of a push behind it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import ValidationError

from flotilla.shared.checks.host_checks import HostChecks
from flotilla.shared.clock import Pauses
from flotilla.shared.environment.settings import ServiceSettings
from flotilla.shared.errors import FlotillaError, Forbidden, NotFound, NotUnderstood, TokenExpired, Unauthorized
from flotilla.shared.host.own_memory import ProcessMemory
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.service import DesiredState, ObservedState, Registered, Registration, ServiceKind

log = logging.getLogger(__name__)

POLL_SECONDS = 8.0
"""With the silence after it less than 15 s: so long it takes to name a host that is cut off."""
JOIN_SECONDS = 0.1
"""How long a poll behind news waits for what comes of it."""
CALL_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 1.0
LEAVE_SECONDS = 2.0
GAUGE_SECONDS = 2.0
CHECK_SECONDS = 20.0
"""For one phase of an examination, and to report its findings."""
LISTENING = frozenset({ServiceKind.TRAINER, ServiceKind.ROLLOUT})
"""Kinds of service that exchange weights on ports besides their own."""


class Membership:
    """Keeps one service registered and hands each new desired state to ``apply``.

    Attributes:
        call_seconds: how much longer than its wait a call may take, with all its repetitions.

    Args:
        client: the gateway.
        registration: how the service presents itself.
        observe: gives the present observation; ``acknowledged`` is filled in here.
        apply: takes a desired state in; it must return quickly and start longer work as tasks of its owner.
        credentials: updated from the gateway's answers, if the service calls others or is called.
        gauges: reported with the load, and soon; none while all is well.
        settings: of a service that takes part in examinations of the fleet.
    """

    def __init__(
        self,
        client: GatewayClient,
        registration: Registration,
        observe: Callable[[], ObservedState],
        apply: Callable[[DesiredState], Awaitable[None]],
        *,
        credentials: Credentials | None = None,
        gauges: Callable[[], Mapping[str, float]] = dict,
        settings: ServiceSettings | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._client = client
        self._registration = registration
        self._observe = observe
        self._apply = apply
        self._credentials = credentials
        self._gauges = gauges
        # A sandbox's children run arbitrary programs, and do not last.
        self._memory = ProcessMemory(with_children=registration.kind is not ServiceKind.SANDBOX)
        self._checker: HostChecks | None = None
        if settings is not None:
            listens = registration.kind in LISTENING
            self._checker = HostChecks(settings.host, settings.redis_url, listens=listens)
        self._checks: asyncio.Queue[tuple[CheckOrder, float]] = asyncio.Queue(1)
        self._last_check: tuple[str, int] | None = None
        self._poll_seconds = poll_seconds
        self.call_seconds = CALL_SECONDS
        self._changed = asyncio.Event()
        self._is_polling = asyncio.Event()
        self._has_news = False
        """Whether a desired state was received since the last poll began."""
        self._applying = asyncio.Lock()
        self._acknowledged: str | None = None
        self._num_applied = self._num_observed = 0
        self.service_id: str | None = None
        self.is_connected = False
        self._is_absence_told = False
        self._refused: str | None = None

    def notify(self) -> None:
        """Send the observed state now instead of at the next poll."""
        self._changed.set()

    async def run(self) -> None:
        """Stay a member until cancelled; a gateway that is unavailable is waited for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(self._poll), name="membership poll")
                tasks.create_task(self._repeat(self._push), name="membership push")
                tasks.create_task(self._watch_gauges(), name="membership gauges")
                tasks.create_task(self._answer_checks(), name="membership checks")
        finally:
            if self._checker is not None:
                self._checker.close()
            await self._leave()

    async def _repeat(self, call: Callable[[str], Awaitable[None]]) -> None:
        pauses = Pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            called_as: str | None = None
            try:
                called_as = await self._registered()
                await call(called_as)
                pauses.reset()
                continue
            except (NotFound, TokenExpired) as error:
                # The other call may have registered again already.
                if called_as == self.service_id:
                    log.info("the service registers again", extra={"cause": error.detail})
                    self.service_id = None
                    self._acknowledged = None
            except (Unauthorized, Forbidden) as error:
                facts = {"gateway": self._client.base_url, "cause": error.detail}
                log.error("the gateway refuses this service's token", extra=facts)  # noqa: TRY400
            except NotUnderstood as error:
                # Its call has renewed the lease, and it continues with what it was asked last.
                if error.detail != self._refused:
                    log.error("the gateway asks for what this release does not know", extra={"cause": error.detail})  # noqa: TRY400
                self._refused = error.detail
                await asyncio.sleep(LONGEST_PAUSE_SECONDS)
                continue
            except FlotillaError as error:
                if not self._is_absence_told:
                    facts = {"gateway": self._client.base_url, "cause": error.detail}
                    log.warning("the gateway does not answer; it is asked until it does", extra=facts)
                    self._is_absence_told = True
            self.is_connected = False
            await asyncio.sleep(pauses.failed())

    async def _watch_gauges(self) -> None:
        """Report when a gauge appears, what becomes of it, and its end."""
        was_there = False
        while True:
            is_there = bool(self._gauges())
            if is_there or was_there:
                self.notify()
            was_there = is_there
            await asyncio.sleep(GAUGE_SECONDS)

    async def _answer_checks(self) -> None:
        """Take part in examinations, one phase after the other; one that is not awaited any more is dropped."""
        while True:
            order, received_at = await self._checks.get()
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    service_id = await self._registered()
                    assert self._checker is not None
                    report = await self._checker.answer(order, service_id, received_at)
                    await self._client.call("POST", f"/v1/services/{service_id}/checks", body=report)
            except Exception as error:
                # An order holds reports of other services: none of them may end this service.
                log.warning("an examination of the fleet has no answer from here", extra={"error": repr(error)})

    def _note_check(self, order: CheckOrder | None) -> None:
        """Take an order in, once."""
        if order is None or self._checker is None or self._last_check == (order.check_id, order.phase):
            return
        if not self._checks.full():
            self._last_check = (order.check_id, order.phase)
            self._checks.put_nowait((order, time.time()))

    async def _registered(self) -> str:
        async with self._applying:
            if self.service_id is None:
                answer = await self._client.call(
                    "POST",
                    "/v1/services",
                    body=self._registration,
                    # With what it was given at its start: a pass may have expired, and does not register.
                    token=self._client.token,
                    deadline_seconds=5.0,
                    attempt_seconds=2.0,
                )
                registered = Registered.model_validate(answer)
                if registered.token is not None:
                    self._client.adopt(registered.token)
                if self._credentials is not None:
                    self._credentials.take(registered)
                self.service_id = registered.service_id
                log.info("service is registered", extra={"service_id": self.service_id})
            return self.service_id

    async def _poll(self, service_id: str) -> None:
        if self._has_news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_SECONDS):
                    await self._changed.wait()
        # From here on it reports its full state.
        self._has_news = False
        self._changed.clear()
        await self._exchange(service_id, self._poll_seconds)

    async def _push(self, service_id: str) -> None:
        await self._changed.wait()
        # While no call waits at the gateway, the next one that does takes it along.
        await self._is_polling.wait()
        if not self._changed.is_set():
            return
        self._changed.clear()
        try:
            await self._exchange(service_id, 0.0)
        except FlotillaError:
            self._changed.set()
            raise

    async def _exchange(self, service_id: str, wait_seconds: float) -> None:
        def observe() -> ObservedState:
            # For each attempt: one that was made before the gateway became unreachable would be taken for the newest.
            observed = self._observe()
            load = {**observed.load, **self._gauges(), **self._memory.look()}
            self._num_observed += 1
            facts = {"number": self._num_observed, "acknowledged": self._acknowledged, "load": load}
            return observed.model_copy(update=facts)

        num_applied = self._num_applied
        if wait_seconds > 0:
            self._is_polling.set()
        try:
            answer = await self._client.call(
                "PUT",
                f"/v1/services/{service_id}/status",
                body=observe,
                params={"wait": wait_seconds},
                deadline_seconds=wait_seconds + self.call_seconds,
            )
        finally:
            if wait_seconds > 0:
                self._is_polling.clear()
        self.is_connected = True
        if self._is_absence_told:
            log.info("the gateway answers again")
            self._is_absence_told = False
        desired = self._understood(answer)
        self._note_check(desired.check)
        self._refused = None
        async with self._applying:
            if desired.tag == self._acknowledged:
                return
            # An answer that was applied since this call began may be newer than this one.
            if num_applied == self._num_applied:
                await self._apply(desired)
                self._acknowledged = desired.tag
                self._num_applied += 1
                self._has_news = True
            # What was taken in the next poll says: one that waits at the gateway is answered at once, since it
            # acknowledges what was wanted before. What was overtaken is asked for again.
            elif wait_seconds == 0:
                self._changed.set()

    def _understood(self, answer: Any) -> DesiredState:
        """Read a desired state; what this release does not know is ignored, never replaced.

        Raises:
            NotUnderstood: it is of a later release.
        """
        try:
            return DesiredState.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise NotUnderstood(f"{where}: {first['msg']}: upgrade this service") from None

    async def _leave(self) -> None:
        if self.service_id is None:
            return
        with contextlib.suppress(FlotillaError):
            await self._client.call(
                "DELETE",
                f"/v1/services/{self.service_id}",
                deadline_seconds=LEAVE_SECONDS,
                attempt_seconds=LEAVE_SECONDS,
            )
