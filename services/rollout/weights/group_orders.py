"""Has an engine that is itself a member of weight groups follow the publications that it takes part in.

The engine is paused when it has joined, so an order is either followed to the commit or given up. A group that breaks
is no failure of this member: it stays paused for the next epoch, which the gateway opens at once, and gives up where
that is without it. It does not stay so for a gateway that is absent: it waits for its word for a while, then goes on
sampling. What was lost on the way is loaded like any version that was missed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from flotilla.services.rollout.engines.base import GroupBroken, GroupMember
from flotilla.services.rollout.weights.switcher import VersionSwitcher
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, Unavailable, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import PublicationOrder, PublicationPhase, ReceiveState, Transport
from flotilla.shared.schemas.service import DesiredState

log = logging.getLogger(__name__)

OPEN = frozenset({PublicationPhase.PREPARING, PublicationPhase.TRANSFERRING})
CLOSE_SECONDS = 5.0
WORD_PHASES = 2
"""Deadlines of a phase until the gateway has said what follows on joining: it takes one at most."""
EPOCH_PHASES = 5
"""The same once tensors have come, which are lost where this is given up: one until the others have them or are found
missing, three for the sender to open the next epoch."""


class GroupOrders:
    """Follows one order at a time.

    Args:
        member: the engine.
        switcher: serves what was received, and loads what was lost.
        on_update: what happens to samples in flight.
        report: called with how far the member is, and why it failed.
        on_engine_death: called when the engine's process ended.
    """

    def __init__(
        self,
        member: GroupMember,
        switcher: VersionSwitcher,
        on_update: OnWeightUpdate,
        report: Callable[[PublicationOrder, ReceiveState, str | None], None],
        on_engine_death: Callable[[WorkerDied], None],
    ) -> None:
        self._member = member
        self._switcher = switcher
        self._on_update = on_update
        self._report = report
        self._on_engine_death = on_engine_death
        self._following: tuple[PublicationOrder, asyncio.Task[None]] | None = None
        self._is_sending = asyncio.Event()
        self._received: int | None = None
        self._hold: int | None = None

    async def follow(self, desired: DesiredState, tasks: asyncio.TaskGroup) -> None:
        """Do what is wanted now, which may be what was wanted before."""
        order, self._hold = desired.publication, desired.hold_version
        if order is None or order.phase not in OPEN or order.transport is not Transport.ENGINE:
            await self._settle(desired.policy_version)
            return
        if order.rendezvous is None:
            return
        if self._following is not None:
            current, task = self._following
            if (current.version, current.epoch) == (order.version, order.epoch):
                if order.phase is PublicationPhase.TRANSFERRING:
                    self._is_sending.set()
                return
            await _cancelled(task)
        self._is_sending = asyncio.Event()
        if order.phase is PublicationPhase.TRANSFERRING:
            self._is_sending.set()
        self._following = order, tasks.create_task(self._take_part(order), name=f"receive version {order.version}")

    async def close(self) -> None:
        """Leave what is going on, as far as the engine answers in time: it is closed next, which ends the rest."""
        leaving = asyncio.create_task(self._leave(), name="leaving the weight group")
        await asyncio.wait([leaving], timeout=CLOSE_SECONDS)

    async def _leave(self) -> None:
        if self._following is not None:
            await _cancelled(self._following[1])
        with contextlib.suppress(FlotillaError):
            await self._member.give_up()

    async def _settle(self, committed: int | None) -> None:
        """Leave an order that is over: the switcher serves what was committed, anything else is given up."""
        if self._following is None:
            return
        (_, task), self._following = self._following, None
        await _cancelled(task)
        if self._received is None or self._received != committed:
            await self._give_up()

    async def _take_part(self, order: PublicationOrder) -> None:
        """Take part until the gateway's next word, which ends this: it comes with a commit or with another order."""
        try:
            try:
                await self._join(order)
                self._report(order, ReceiveState.JOINED, None)
                await _told(self._is_sending, WORD_PHASES * order.deadline_seconds)
                self._check_hold(order)
                await self._member.receive(order)
                self._received = order.version
                self._report(order, ReceiveState.RECEIVED, None)
                self._switcher.look()
                await _told(asyncio.Event(), EPOCH_PHASES * order.deadline_seconds)
            except GroupBroken as error:
                log.info("the weight group broke", extra={"version": order.version, "cause": str(error)})
                await _told(asyncio.Event(), EPOCH_PHASES * order.deadline_seconds)
        except WorkerDied as error:
            self._on_engine_death(error)
        except (WeightTransferFailed, DeadlineExceeded, Unavailable) as error:
            log.warning("publication was not received", extra={"version": order.version, "error": error.detail})
            await self._give_up()
            self._report(order, ReceiveState.FAILED, error.detail)

    async def _join(self, order: PublicationOrder) -> None:
        try:
            async with asyncio.timeout(order.deadline_seconds):
                await self._switcher.reserve()
                self._received = None
                self._check_hold(order)
                await self._member.join(order, self._on_update)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not stop sampling and join within {order.deadline_seconds} s"
            ) from None

    def _check_hold(self, order: PublicationOrder) -> None:
        # Asked again before the first tensor: the evaluation may have begun since.
        if self._hold is not None and order.version > self._hold:
            held = f"an evaluation holds version {self._hold}: its weights cannot be written over"
            raise WeightTransferFailed(held)

    async def _give_up(self) -> None:
        self._received = None
        try:
            is_lost = not await self._member.give_up()
        except WorkerDied as error:
            self._on_engine_death(error)
            return
        await self._switcher.release(is_lost=is_lost)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def _told(word: asyncio.Event, seconds: float) -> None:
    """Wait for the gateway, while nothing is sampled.

    Raises:
        DeadlineExceeded: it said nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            await word.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the gateway has not said within {seconds:g} s what follows: sampling goes on under the version that is "
            "committed"
        ) from None
