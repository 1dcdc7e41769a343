"""An examination: orders go out with desired states, and each finding names host, attempt and remedy."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.services.gateway.checks import examination
from flotilla.services.gateway.checks.examination import FOLDER, Examinations
from flotilla.services.gateway.checks.judging import are_neighbours
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.checks.facts import host_facts
from flotilla.shared.errors import Conflict, Unavailable
from flotilla.shared.schemas.checks import (
    LOOK,
    REACHED,
    SILENT,
    Attempt,
    CheckOrder,
    CheckReport,
    CheckTarget,
    FleetExamination,
    FleetFinding,
    HostFacts,
    Orphan,
)
from flotilla.shared.schemas.service import Capabilities, DesiredState, ObservedState, Registration, ServiceKind
from flotilla.shared.service.devices import machine_identity
from tests.unit.gateway.builders import a_gateway, a_registration, say

OWN = host_facts().model_copy(
    update={"orphans": (), "temporary_free_bytes": 1 << 40, "shared_memory_free_bytes": 1 << 40, "is_changed": False}
)
Answering = Callable[[CheckOrder, CheckReport], CheckReport]


class Scripted:
    """Services on hosts, each of which answers as it is told."""

    def __init__(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gateway: GatewayState = a_gateway(data=data)
        self.data = data
        self.answers: dict[str, Answering] = {}
        self.hosts: dict[str, str] = {}
        self.dialled: list[str] = []
        self.cut: set[tuple[str, str]] = set()
        monkeypatch.setattr("flotilla.services.gateway.checks.examination.host_facts", lambda: OWN)
        self.examinations = Examinations(
            self.gateway.registry,
            self.gateway.fleet.returning,
            data,
            self.gateway.clock,
            dial=self._dial,
            phase_seconds=0.3,
        )
        self.gateway.examinations = self.examinations  # type: ignore[misc]

    async def _dial(self, targets: Iterable[CheckTarget], _: str) -> tuple[Attempt, ...]:
        tried = list(targets)
        self.dialled += [each.service_id for each in tried]
        return tuple(self._attempt("gateway", each) for each in tried)

    def _attempt(self, source: str, target: CheckTarget, port: int = 9000) -> Attempt:
        host = target.url.split("//")[1].split(":")[0]
        outcome = SILENT if (source, host) in self.cut else REACHED
        return Attempt(service_id=target.service_id, port=port, use="http", outcome=outcome, seconds=4.0)

    async def add(
        self, kind: ServiceKind, host: str, answering: Answering | None = lambda _, report: report, **changes: Any
    ) -> str:
        incarnation = changes.pop("incarnation", f"{kind}{host}")
        registration: Registration = a_registration(kind, incarnation, address=f"http://{host}:9000", **changes)
        name = (await self.gateway.fleet.register(registration)).service_id
        self.hosts[name] = host
        if answering is not None:
            self.answers[name] = answering
        return name

    def _answer(self, name: str, order: CheckOrder) -> CheckReport:
        now = self.gateway.clock.now()
        if order.phase == LOOK:
            if order.folder is not None:
                (Path(order.folder) / name).write_text(order.check_id)
            return CheckReport(check_id=order.check_id, phase=LOOK, received_at=now, sent_at=now, facts=OWN)
        attempts = tuple(self._attempt(self.hosts[name], each) for each in order.targets)
        return CheckReport(check_id=order.check_id, phase=order.phase, received_at=now, sent_at=now, attempts=attempts)

    async def _follow(self, name: str) -> None:
        seen: set[int] = set()
        while True:
            # As it goes over the wire: encoded once for all that have the same tag.
            body = self.gateway.fleet.bodies.of(await say(self.gateway, name, ObservedState()))
            order = DesiredState.model_validate_json(body).check
            if order is not None and order.phase not in seen and name in self.answers:
                seen.add(order.phase)
                self.gateway.examinations.report(name, self.answers[name](order, self._answer(name, order)))
            await asyncio.sleep(0)

    async def examine(self) -> FleetExamination:
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(self._follow(name)) for name in self.hosts]
            try:
                return await self.examinations.examine()
            finally:
                for each in following:
                    each.cancel()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(tmp_path, monkeypatch)


def changed(**facts: Any) -> Answering:
    """Answer with other facts."""

    def answer(order: CheckOrder, report: CheckReport) -> CheckReport:
        if order.phase != LOOK:
            return report
        found = report.facts or OWN
        return report.model_copy(update={"facts": HostFacts.model_validate(found.model_dump() | facts)})

    return answer


def only(found: FleetExamination) -> FleetFinding:
    assert len(found.findings) == 1, found.findings
    return found.findings[0]


async def test_a_fleet_that_is_well_has_no_findings_and_leaves_nothing(fleet: Scripted) -> None:
    for kind, host in ((ServiceKind.ROLLOUT, "10.0.0.2"), (ServiceKind.TRAINER, "10.0.0.3")):
        await fleet.add(kind, host)
    await fleet.add(ServiceKind.SANDBOX, "10.0.0.4")

    found = await fleet.examine()

    assert found.is_well and found.findings == ()
    assert (found.num_hosts, found.num_asked, found.num_pairs, found.num_pairs_tried) == (3, 3, 3, 3)
    assert list((fleet.data / FOLDER).iterdir()) == []
    assert all(each.check is None for each in fleet.gateway.registry)


async def test_only_what_an_examination_left_is_removed(fleet: Scripted) -> None:
    kept = [fleet.data / "checks" / "mine", fleet.data / FOLDER / "mine", fleet.data / FOLDER / ("0" * 17)]
    for each in (*kept, fleet.data / FOLDER / "0123456789abcdef"):
        each.mkdir(parents=True)
    os.mkfifo(fleet.data / FOLDER / ("f" * 16))

    await fleet.examine()

    assert all(each.is_dir() for each in kept)
    assert {each.name for each in (fleet.data / FOLDER).iterdir()} == {"mine", "0" * 17, "f" * 16}


async def test_a_link_in_place_of_the_folder_is_refused_and_not_followed(fleet: Scripted) -> None:
    elsewhere = fleet.data / "elsewhere"
    (elsewhere / "0123456789abcdef").mkdir(parents=True)
    (fleet.data / FOLDER).symlink_to(elsewhere)

    with pytest.raises(Conflict, match="no link"):
        await fleet.examinations.examine()

    assert [each.name for each in elsewhere.iterdir()] == ["0123456789abcdef"]


async def test_a_data_directory_that_hangs_ends_the_examination(
    fleet: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(examination, "FOLDER_SECONDS", 0.05)
    monkeypatch.setattr(examination, "missing_in", lambda *_: may_go_on.wait())

    with pytest.raises(Unavailable, match="does not answer"):
        await fleet.examinations.examine()

    may_go_on.set()


async def test_a_cut_between_two_hosts_is_named_with_both_and_a_remedy(fleet: Scripted) -> None:
    await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2")
    await fleet.add(ServiceKind.TRAINER, "10.0.0.3")
    fleet.cut = {("10.0.0.2", "10.0.0.3")}

    found = await fleet.examine()

    finding = only(found)
    assert not found.is_well and (finding.verdict, finding.topic, finding.host) == (
        "failed",
        "reachability",
        "10.0.0.2",
    )
    assert "10.0.0.3" in finding.tried and "9000" in finding.tried and finding.found == "no answer within 4 s"
    assert "packets from 10.0.0.2 to 10.0.0.3" in finding.advice


async def test_two_hosts_that_one_does_not_reach_are_two_findings(fleet: Scripted) -> None:
    await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2")
    for host in ("10.0.0.3", "10.0.0.4"):
        await fleet.add(ServiceKind.SANDBOX, host)
    fleet.cut = {("10.0.0.2", "10.0.0.3"), ("10.0.0.2", "10.0.0.4")}

    assert len((await fleet.examine()).findings) == 2


async def test_a_host_that_nobody_reaches_is_one_finding(fleet: Scripted) -> None:
    for number in range(2, 7):
        await fleet.add(ServiceKind.ROLLOUT, f"10.0.0.{number}")
    fleet.cut = {(f"10.0.0.{number}", "10.0.0.2") for number in range(3, 7)}

    finding = only(await fleet.examine())

    assert finding.host == "10.0.0.2" and finding.found == "nobody reaches it: no answer within 4 s"


async def test_who_does_not_answer_is_named_and_holds_nobody_up(fleet: Scripted) -> None:
    silent = await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2", None)
    await fleet.add(ServiceKind.TRAINER, "10.0.0.3")

    finding = only(await fleet.examine())

    assert (finding.topic, finding.host, finding.service_id) == ("silence", "10.0.0.2", silent)
    assert "no contact with 10.0.0.2" in finding.found


async def test_a_host_that_was_given_up_is_named_with_the_time(fleet: Scripted) -> None:
    name = await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2")
    fleet.gateway.clock.advance(40)  # type: ignore[attr-defined]
    await fleet.gateway.fleet.give_up(fleet.gateway.registry.get(name))
    fleet.hosts.clear()

    finding = only(await fleet.examine())

    assert finding.host == "10.0.0.2" and "no contact with 10.0.0.2" in finding.found and "30 s" in finding.found


@pytest.mark.parametrize(
    ("facts", "topic", "verdict", "words"),
    [
        ({"redis_problem": "no answer within 5 s"}, "redis", "failed", "no answer within 5 s"),
        ({"code": "other"}, "release", "warning", "messages are the same"),
        ({"release": "0.9.0", "schemas": "other"}, "release", "failed", "messages differ too"),
        ({"is_changed": True}, "release", "warning", "after it began"),
        ({"folder_problem": "No such file or directory"}, "folder", "failed", "No such file"),
        ({"port_problem": "every port is in use"}, "ports", "failed", "in use"),
        ({"port_range": "20000-20009", "free_ports": 3}, "ports", "warning", "3 are free"),
        ({"temporary_free_bytes": 5}, "disk", "warning", "0.0 GB"),
        ({"shared_memory_free_bytes": 5, "shared_memory_bytes": 64 << 20}, "shared_memory", "warning", "0.0 of 0.1"),
        (
            {"orphans": [Orphan(pid=7, command="flotilla.x.y", devices=("GPU-a",), memory_bytes=1 << 30).model_dump()]},
            "devices",
            "failed",
            "pid 7: flotilla.x.y, which holds 1.0 GB of GPU-a",
        ),
    ],
)
async def test_each_fact_that_is_wrong_is_a_finding(
    fleet: Scripted, facts: Any, topic: str, verdict: str, words: str
) -> None:
    await fleet.add(ServiceKind.TRAINER, "10.0.0.3", changed(**facts))

    finding = only(await fleet.examine())

    assert (finding.topic, finding.verdict, finding.host) == (topic, verdict, "10.0.0.3")
    assert words in finding.found and finding.advice and finding.tried


async def test_a_clock_is_wrong_by_more_than_the_round_trip_leaves_open(fleet: Scripted) -> None:
    def ahead(seconds: float) -> Answering:
        return lambda _, report: report.model_copy(
            update={"received_at": report.received_at + seconds, "sent_at": report.sent_at + seconds}
        )

    def late(order: CheckOrder, report: CheckReport) -> CheckReport:
        fleet.gateway.clock.advance(4)  # type: ignore[attr-defined]
        return report

    await fleet.add(ServiceKind.REWARD, "10.0.0.2", ahead(5))
    await fleet.add(ServiceKind.REWARD, "10.0.0.3", ahead(0.5))

    found = await fleet.examine()

    assert (only(found).topic, only(found).host) == ("clock", "10.0.0.2")
    assert only(found).found == "5.0 s ahead, to within 0.00 s" and found.largest_skew_seconds == 5.0

    fleet.answers = dict.fromkeys(fleet.answers, late)
    assert [each for each in (await fleet.examine()).findings if each.topic == "clock"] == []


@pytest.mark.parametrize("wrong", [inf, nan, 1e308, -1.0])
def test_a_time_that_no_clock_shows_is_refused_where_it_is_reported(wrong: float) -> None:
    good = {"check_id": "ab", "phase": LOOK, "received_at": 5.0, "sent_at": 5.0}
    for name in ("received_at", "sent_at"):
        with pytest.raises(ValidationError):
            CheckReport.model_validate(good | {name: wrong})


@pytest.mark.parametrize("name", ["temporary_free_bytes", "shared_memory_free_bytes", "shared_memory_bytes"])
@pytest.mark.parametrize("wrong", [-1, 10**400])
def test_sizes_that_cannot_be_computed_with_are_refused_where_they_are_reported(name: str, wrong: int) -> None:
    with pytest.raises(ValidationError):
        HostFacts.model_validate(OWN.model_dump() | {name: wrong})


async def test_the_gateway_tries_an_address_of_each_machine_on_its_own_alone(fleet: Scripted) -> None:
    own, other = Capabilities(machine=machine_identity()), Capabilities(machine="another")
    near = await fleet.add(ServiceKind.REWARD, "127.0.0.1", capabilities=own)
    await fleet.add(ServiceKind.SANDBOX, "127.0.0.1", capabilities=other)
    await fleet.add(ServiceKind.TRAINER, "169.254.169.254", capabilities=other)
    far = await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2", capabilities=other)

    await fleet.examine()

    assert set(fleet.dialled) == {near, far}


async def test_a_stranger_at_the_address_of_another_machine_does_not_stand_for_it(fleet: Scripted) -> None:
    orphan = Orphan(pid=7, command="flotilla.x.y", devices=("GPU-a",), memory_bytes=1 << 30).model_dump()
    machines = [Capabilities(machine=each) for each in ("one", "two")]
    stranger = await fleet.add(ServiceKind.TRAINER, "10.0.0.3", changed(orphans=[orphan]), capabilities=machines[0])
    victim = await fleet.add(
        ServiceKind.TRAINER, "10.0.0.3", changed(redis_problem="away"), capabilities=machines[1], incarnation="2"
    )

    found = {each.topic: each.service_id for each in (await fleet.examine()).findings}

    assert found == {"devices": stranger, "redis": victim}


async def test_a_file_that_the_gateway_does_not_see_means_another_folder(fleet: Scripted) -> None:
    def elsewhere(order: CheckOrder, report: CheckReport) -> CheckReport:
        if order.phase == LOOK and order.folder is not None:
            (Path(order.folder) / trainer).unlink()
        return report

    trainer = await fleet.add(ServiceKind.TRAINER, "10.0.0.3", elsewhere)

    finding = only(await fleet.examine())

    assert finding.topic == "folder" and "another one of the same name" in finding.found


async def test_a_service_that_registers_as_loopback_in_a_fleet_of_machines_is_told(fleet: Scripted) -> None:
    await fleet.add(ServiceKind.REWARD, "127.0.0.1", capabilities=Capabilities(machine="one"))
    assert (await fleet.examine()).is_well
    await fleet.add(ServiceKind.REWARD, "10.0.0.3", capabilities=Capabilities(machine="two"))

    finding = only(await fleet.examine())

    assert (finding.topic, finding.host) == ("address", "127.0.0.1") and "FLOTILLA_HOST" in finding.advice


async def test_an_outcome_that_this_release_does_not_know_is_shown_as_it_is(fleet: Scripted) -> None:
    def later(_: CheckOrder, report: CheckReport) -> CheckReport:
        attempts = tuple(each.model_copy(update={"outcome": "quantum"}) for each in report.attempts)
        return report.model_copy(update={"attempts": attempts})

    await fleet.add(ServiceKind.ROLLOUT, "10.0.0.2", later)
    await fleet.add(ServiceKind.TRAINER, "10.0.0.3")

    assert only(await fleet.examine()).found == "quantum"


async def test_one_examination_at_a_time_and_reports_of_others_count_for_nothing(fleet: Scripted) -> None:
    name = await fleet.add(ServiceKind.REWARD, "10.0.0.2", None)
    first = asyncio.create_task(fleet.examinations.examine())
    while fleet.gateway.registry.get(name).check is None:
        await asyncio.sleep(0)

    with pytest.raises(Conflict):
        await fleet.examinations.examine()
    fleet.examinations.report(name, CheckReport(check_id="ab", phase=LOOK, received_at=0, sent_at=0, facts=OWN))

    assert [each.topic for each in (await first).findings] == ["silence"]


@pytest.mark.parametrize(
    ("one", "other", "works"),
    [("0.1.0", "0.2.3", True), ("0.1.0", "0.3.0", False), ("1.0.0", "0.9.0", False), ("unknown", "0.1.0", False)],
)
def test_neighbouring_minor_versions_work_together(one: str, other: str, works: bool) -> None:
    assert are_neighbours(one, other) is works
