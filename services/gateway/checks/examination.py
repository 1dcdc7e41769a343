"""An examination of the whole fleet: orders go out with the desired states, what services find comes back by a call.

Nothing but the services' own calls is needed, so a service that is unreachable from outside takes part as well. Each
phase has an end; services without an answer by then are named. Orders are in memory only: a restart loses them, and
the client asks again.
"""

import asyncio
import os
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from flotilla.services.gateway.checks.judging import Answer, Evidence, judge
from flotilla.services.gateway.checks.pairs import Member, Pairs, choose_pairs, is_elsewhere, representatives
from flotilla.services.gateway.membership.joining import Returning
from flotilla.services.gateway.registry.services import LiveService, Registry
from flotilla.services.gateway.signals import Signal, fire_in_turn, wait_for_any
from flotilla.shared.checks.attempts import reach_all
from flotilla.shared.checks.facts import host_facts
from flotilla.shared.checks.host_checks import missing_in, write_into
from flotilla.shared.clock import Clock
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.checks import (
    LOOK,
    MOST_FILES,
    REACH,
    Attempt,
    CheckOrder,
    CheckReport,
    CheckTarget,
    FleetExamination,
    FleetFinding,
)
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.service.devices import machine_identity

PHASE_SECONDS: Final = 15.0
"""For all answers of a phase. Attempts take four seconds, Redis five, and a host may be busy."""
MOST_FINDINGS: Final = 200
MOST_DIALLED: Final = 48
"""Services that the gateway itself tries to reach."""
FOLDER: Final = ".examinations"
FOLDER_SECONDS: Final = 10.0
"""For each thing that is done in the data directory: a file system of a network may hang."""
CHECK_ID: Final = re.compile(r"[0-9a-f]{16}")
Value = TypeVar("Value")
GATEWAY: Final = "gateway"


class Examinations:
    """Examines the fleet, one examination at a time.

    Args:
        data: the gateway's data directory.
        dial: tries to reach services from here; another one in tests.
        phase_seconds: for all answers of a phase.
    """

    def __init__(
        self,
        registry: Registry,
        returning: Returning,
        data: Path,
        clock: Clock,
        *,
        dial: Callable[[Iterable[CheckTarget], str], Awaitable[tuple[Attempt, ...]]] = reach_all,
        phase_seconds: float = PHASE_SECONDS,
    ) -> None:
        self._registry = registry
        self._returning = returning
        self._data = data
        self._clock = clock
        self._dial = dial
        self._phase_seconds = phase_seconds
        self._orders: dict[str, CheckOrder] = {}
        self._answers: dict[str, Answer] = {}
        self._answered = Signal()
        self._room = asyncio.Lock()

    def report(self, service_id: str, report: CheckReport) -> None:
        """Record a service's findings; those of another examination or phase are ignored."""
        order = self._orders.get(service_id)
        if order is None or (order.check_id, order.phase) != (report.check_id, report.phase):
            return
        # The first counts: a repeated call would have a later time.
        self._answers.setdefault(service_id, Answer(report, order.sent_at, self._clock.now()))
        self._answered.fire()

    async def examine(self) -> FleetExamination:
        """Examine the fleet.

        Raises:
            Conflict: another examination is under way.
        """
        if self._room.locked():
            raise Conflict("the fleet is being examined already: ask again in half a minute")
        async with self._room:
            return await self._examine(secrets.token_hex(8))

    async def _examine(self, check_id: str) -> FleetExamination:
        began = time.monotonic()
        members = {each.id: _member(each) for each in self._registry}
        asked = representatives(members.values())
        folder = await _patiently(partial(_make, self._data, check_id))
        try:
            dialling = asyncio.create_task(self._dial_some(asked, check_id), name="dial services")
            try:
                writers = {each.id for each in asked if each.kind is not ServiceKind.SANDBOX}
                orders = {
                    each.id: CheckOrder(
                        check_id=check_id, phase=LOOK, sent_at=0.0, folder=str(folder) if each.id in writers else None
                    )
                    for each in asked
                }
                own = await asyncio.to_thread(host_facts)
                looked = await self._phase(orders)
                pairs = choose_pairs([each for each in asked if each.id in looked], seed=check_id)
                wrote = sorted(name for name in writers & looked.keys() if _wrote(looked[name]))
                unseen = await _patiently(partial(missing_in, str(folder), wrote, check_id))
                free_bytes = (await _patiently(partial(shutil.disk_usage, self._data))).free
                seen = [name for name in wrote if name not in unseen]
                orders = {
                    name: self._reaching(
                        name, looked, pairs, check_id=check_id, folder=str(folder) if name in wrote else None, seen=seen
                    )
                    for name in looked
                }
                reached = await self._phase(orders)
                dialled = await dialling
            finally:
                dialling.cancel()
        finally:
            with suppress(Unavailable):
                await _patiently(partial(_remove, folder))
        evidence = Evidence(
            asked=asked,
            looked=looked,
            targets=pairs.targets,
            reached=reached,
            dialled=dialled,
            silences=[*self._silences(asked, looked), *self._given_up()],
            own=own,
            data=str(self._data),
            data_free_bytes=free_bytes,
            unseen=unseen,
        )
        return self._told(evidence, pairs, len(members), time.monotonic() - began)

    def _told(self, evidence: Evidence, pairs: Pairs, num_services: int, seconds: float) -> FleetExamination:
        findings = judge(evidence)
        skews = [abs(each.skew[0]) for each in evidence.looked.values()]
        return FleetExamination(
            is_well=all(each.verdict != "failed" for each in findings),
            findings=tuple(findings[:MOST_FINDINGS]),
            num_more_findings=max(0, len(findings) - MOST_FINDINGS),
            num_hosts=len({each.host for each in evidence.asked}),
            num_services=num_services,
            num_asked=len(evidence.asked),
            num_pairs=pairs.num_hosts,
            num_pairs_tried=pairs.num_tried,
            largest_skew_seconds=round(max(skews), 3) if skews else None,
            seconds=round(seconds, 1),
        )

    async def _phase(self, orders: dict[str, CheckOrder]) -> dict[str, Answer]:
        """Give orders out, and wait until each has an answer, or the phase is over."""
        self._answers = {}
        now = self._clock.now()
        self._orders = {name: each.model_copy(update={"sent_at": now}) for name, each in orders.items()}
        end = time.monotonic() + self._phase_seconds
        try:
            self._give(self._orders)
            while True:
                answered = self._answered.next
                # A service that leaves meanwhile will not answer.
                waits = any(name not in self._answers and self._registry.find(name) for name in orders)
                left = end - time.monotonic()
                if not waits or left <= 0:
                    return dict(self._answers)
                await wait_for_any(min(left, 1.0), answered)
        finally:
            self._give(dict.fromkeys(self._orders))
            self._orders = {}

    def _give(self, orders: "dict[str, CheckOrder] | dict[str, None]") -> None:
        found = [(each, order) for name, order in orders.items() if (each := self._registry.find(name)) is not None]
        for service, order in found:
            service.check = order
        fire_in_turn([service.changed for service, _ in found])

    def _reaching(
        self,
        name: str,
        looked: dict[str, Answer],
        pairs: Pairs,
        *,
        check_id: str,
        folder: str | None,
        seen: Iterable[str],
    ) -> CheckOrder:
        caller = self._registry.find(name)
        own = (caller and caller.capabilities.machine) or ""
        return CheckOrder(
            check_id=check_id,
            phase=REACH,
            sent_at=0.0,
            folder=folder,
            files=() if folder is None else (GATEWAY, *seen)[:MOST_FILES],
            targets=tuple(
                _target(service, own, ports=_ports_of(looked[target]))
                for target in pairs.targets.get(name, ())
                if (service := self._registry.find(target)) is not None
            ),
        )

    async def _dial_some(self, asked: list[Member], check_id: str) -> tuple[Attempt, ...]:
        own = machine_identity() or ""
        near = [each for each in asked if not is_elsewhere(each, own)]
        services = [service for each in near if (service := self._registry.find(each.id)) is not None]
        return await self._dial([_target(each, own) for each in services[:MOST_DIALLED]], check_id)

    def _silences(self, asked: list[Member], looked: dict[str, Answer]) -> list[FleetFinding]:
        found = []
        for member in asked:
            if member.id in looked:
                continue
            service = self._registry.find(member.id)
            words = f"it left while it was asked ({member.id})"
            if service is not None:
                words = f"{self._returning.silence_of(service)}, and no answer in {self._phase_seconds:g} s"
            advice = "it may be of a release without this, cut off, or too busy: see its log"
            found.append(_silence(member.host, member.id, words, advice))
        return found

    def _given_up(self) -> list[FleetFinding]:
        advice = "see whether the host runs and reaches the gateway; it registers again by itself once it does"
        return [
            _silence(urlsplit(record.address).hostname or record.host, record.id, words, advice)
            for record, words in self._returning.away()
        ]


def _silence(host: str, service_id: str, found: str, advice: str) -> FleetFinding:
    return FleetFinding(
        verdict="failed",
        topic="silence",
        host=host,
        service_id=service_id,
        tried="waited for its calls to the gateway",
        found=found,
        advice=advice,
    )


def _member(service: LiveService) -> Member:
    host = urlsplit(service.record.address).hostname or service.record.host
    return Member(service.id, host, service.kind, service.capabilities.machine or "")


def _target(service: LiveService, machine: str, ports: Mapping[str, int] | None = None) -> CheckTarget:
    """Make what a service is tried as from a machine."""
    is_far = (service.capabilities.machine or "") != machine
    return CheckTarget(service_id=service.id, url=service.record.address, ports=ports or {}, is_elsewhere=is_far)


def _wrote(answer: Answer) -> bool:
    return answer.report.facts is not None and answer.report.facts.folder_problem is None


def _ports_of(answer: Answer) -> dict[str, int]:
    return {} if answer.report.facts is None else {str(use): port for use, port in answer.report.facts.ports.items()}


async def _patiently(work: Callable[[], Value]) -> Value:
    """Do something in the data directory, and wait for it only so long.

    Raises:
        Unavailable: it takes longer.
    """
    try:
        async with asyncio.timeout(FOLDER_SECONDS):
            return await on_daemon_thread(work, "examination folder")
    except TimeoutError:
        raise Unavailable(f"the gateway's data directory does not answer within {FOLDER_SECONDS:g} s") from None


def _make(data: Path, check_id: str) -> Path:
    """Make the folder of an examination; what one that was broken off has left is removed, and nothing else.

    Raises:
        Conflict: it cannot be made, or a link or something else has its parent's name.
    """
    kept = data.resolve() / FOLDER
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with _opened(kept) as at:
            with os.scandir(at) as entries:
                left = [each.name for each in entries if CHECK_ID.fullmatch(each.name) and _is_folder(each)]
            for name in left:
                shutil.rmtree(name, ignore_errors=True, dir_fd=at)
            os.mkdir(check_id, dir_fd=at)
    except OSError as error:
        why = error.strerror or error
        raise Conflict(f"{kept} must be a folder of the gateway's own, and no link: {why}") from error
    write_into(str(kept / check_id), GATEWAY, check_id)
    return kept / check_id


def _remove(folder: Path) -> None:
    with suppress(OSError), _opened(folder.parent) as at:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=at)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield at
    finally:
        os.close(at)
