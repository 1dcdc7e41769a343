"""Judges the answers of a fleet: each finding names the host, the attempt and the remedy. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from flotilla.services.gateway.checks.pairs import Member
from flotilla.shared.checks.addresses import is_of_each_machine
from flotilla.shared.schemas.checks import (
    ANOTHER,
    NO_ROUTE,
    NOT_BELIEVED,
    REACHED,
    REFUSED,
    SILENT,
    Attempt,
    CheckReport,
    FleetFinding,
    HostFacts,
)
from flotilla.shared.schemas.service import ServiceKind

SKEW_SECONDS: Final = 1.0
FATAL_SKEW_SECONDS: Final = 60.0
LEAST_PORTS: Final = 8
GIBIBYTE: Final = 1024**3
LEAST_TEMPORARY_BYTES: Final = GIBIBYTE
LEAST_DATA_BYTES: Final = GIBIBYTE
LEAST_SHARED_BYTES: Final = GIBIBYTE
MAPS: Final = frozenset({ServiceKind.TRAINER, ServiceKind.ROLLOUT})
"""Kinds of service that keep weights in shared memory."""
FILES: Final = "the same FLOTILLA_DATA on a file system of gateway and trainers (docs/cluster.md#files)"
REACHING: Final = "docs/cluster.md#what-must-reach-what"
WORDS: Final[Mapping[str, str]] = {
    SILENT: "no answer",
    REFUSED: "refused",
    NO_ROUTE: "no route",
    NOT_BELIEVED: "its certificate is not believed",
    ANOTHER: "something else answers",
}
Verdict = Literal["failed", "warning"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said in a phase, and when.

    Attributes:
        asked_at, arrived_at: of order and report, in seconds by the gateway's clock.
    """

    report: CheckReport
    asked_at: float
    arrived_at: float

    @property
    def skew(self) -> tuple[float, float]:
        """How far its clock is ahead of the gateway's, and by how much that may be wrong, in seconds."""
        out = self.report.received_at - self.asked_at
        back = self.arrived_at - self.report.sent_at
        return (out - back) / 2, max(0.0, (out + back) / 2)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known when an examination ends.

    Attributes:
        asked: members that were asked in the first phase.
        looked: their answers, by id.
        targets: whom each should reach, by id.
        reached: answers of the second phase, by id.
        dialled: the gateway's own attempts.
        silences: words for each service that is out of reach, by host: those that did not answer and those removed
            before.
        own: the gateway's facts.
        data: the gateway's data directory.
        data_free_bytes: of its file system.
        unseen: ids of services whose file the gateway did not find.
    """

    asked: Sequence[Member]
    looked: Mapping[str, Answer]
    targets: Mapping[str, tuple[str, ...]]
    reached: Mapping[str, Answer]
    dialled: Sequence[Attempt]
    silences: Sequence[FleetFinding]
    own: HostFacts
    data: str
    data_free_bytes: int
    unseen: Iterable[str] = ()

    @property
    def members(self) -> dict[str, Member]:
        """Members that were asked, by id."""
        return {each.id: each for each in self.asked}


def judge(evidence: Evidence) -> list[FleetFinding]:
    """Find what is wrong, what failed first."""
    found = [*evidence.silences]
    for part in (_addresses, _reaching, _unanswered, _dialled, _data):
        found += part(evidence)
    unseen = set(evidence.unseen)
    for member in evidence.asked:
        answer = evidence.looked.get(member.id)
        if answer is None:
            continue
        found += _clock(member, answer)
        if (facts := answer.report.facts) is not None:
            found += [
                *_release(member, facts, evidence.own),
                *_redis(member, facts),
                *_folder(member, facts, member.id in unseen, evidence.reached.get(member.id)),
                *_ports(member, facts),
                *_room(member, facts),
                *_devices(member, facts),
            ]
    # What is of the host is found by each service there.
    distinct: dict[tuple[str, ...], FleetFinding] = {}
    for each in found:
        distinct.setdefault((each.topic, each.host, each.tried, each.found), each)
    return sorted(distinct.values(), key=lambda each: each.verdict != "failed")


def _data(evidence: Evidence) -> Iterator[FleetFinding]:
    if evidence.data_free_bytes < LEAST_DATA_BYTES:
        yield _finding(
            "failed",
            "disk",
            Member("gateway", "gateway", ServiceKind.TRAINER),
            tried=f"looked at {evidence.data}",
            found=f"{evidence.data_free_bytes / GIBIBYTE:.1f} GB are free",
            advice="make room: the database, checkpoints and samples are there",
            names_service=False,
        )


def _finding(
    verdict: Verdict, topic: str, where: Member, *, tried: str, found: str, advice: str, names_service: bool = True
) -> FleetFinding:
    service_id = where.id if names_service else None
    return FleetFinding(
        verdict=verdict, topic=topic, host=where.host, service_id=service_id, tried=tried, found=found, advice=advice
    )


def _dialled(evidence: Evidence) -> Iterator[FleetFinding]:
    """Judge the gateway's own way to services."""
    members = evidence.members
    for each in evidence.dialled:
        if each.outcome != REACHED and each.service_id in members:
            member = members[each.service_id]
            yield _finding(
                "warning",
                "gateway",
                member,
                tried=f"the gateway tried port {each.port} of {member.host}",
                found=_words(each),
                advice=f"logs and agents from outside need it: {_advice(each, 'the gateway', member.host)}",
            )


def _reaching(evidence: Evidence) -> Iterator[FleetFinding]:
    """Judge the connections between services; a service that no other reaches is one finding."""
    members = evidence.members
    failures = {
        (caller, target): attempts
        for caller, answer in evidence.reached.items()
        for target, attempts in _failures_of(answer).items()
        if caller in members and target in members
    }
    callers: dict[str, list[str]] = {}
    for caller, targets in evidence.targets.items():
        for target in targets if caller in evidence.reached else ():
            callers.setdefault(target, []).append(caller)
    for target, tried_by in callers.items():
        failed = {caller: found for caller in tried_by if (found := failures.get((caller, target)))}
        where = members[target]
        if 1 < len(failed) == len(tried_by):
            attempts = next(iter(failed.values()))
            yield _finding(
                "failed",
                "reachability",
                where,
                tried=f"{', '.join(sorted({members[each].host for each in failed})[:8])} tried {_ports_of(attempts)}",
                found=f"nobody reaches it: {_words(attempts[0])}",
                advice=_advice(attempts[0], "them", where.host),
            )
            continue
        for caller, attempts in failed.items():
            source = members[caller]
            yield _finding(
                "failed",
                "reachability",
                source,
                tried=f"{source.host} ({caller}) tried {_ports_of(attempts)} of {where.host} ({target})",
                found=_words(attempts[0]),
                advice=_advice(attempts[0], source.host, where.host),
            )


def _unanswered(evidence: Evidence) -> Iterator[FleetFinding]:
    """Name those that checked their host, and were silent when they should reach others."""
    for caller in evidence.targets.keys() & evidence.looked.keys() - evidence.reached.keys():
        yield _finding(
            "failed",
            "silence",
            evidence.members[caller],
            tried="asked it to reach other services",
            found="it answered nothing in time",
            advice="look into its log; it may be cut off, or its host may be too busy",
        )


def _failures_of(answer: Answer) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for each in answer.report.attempts:
        if each.outcome != REACHED:
            found.setdefault(each.service_id, []).append(each)
    return found


def _ports_of(attempts: Sequence[Attempt]) -> str:
    listed = ", ".join(f"{each.port} ({each.use})" for each in attempts)
    return f"port {listed}" if len(attempts) == 1 else f"ports {listed}"


def _words(attempt: Attempt) -> str:
    # A later release may know outcomes that this one does not.
    said = WORDS.get(attempt.outcome, attempt.outcome)
    if attempt.outcome == SILENT:
        return f"{said} within {attempt.seconds:.0f} s"
    return f"{said} ({attempt.detail})" if attempt.detail and attempt.outcome != REFUSED else said


def _advice(attempt: Attempt, source: str, target: str) -> str:
    match attempt.outcome:
        case "silent":
            return (
                f"packets from {source} to {target} or back are lost: mend the network between them, or let a firewall "
                f"or network policy pass them ({REACHING})"
            )
        case "refused":
            return f"nobody listens there: FLOTILLA_HOST on {target} must be the address at which others reach it"
        case "no_route":
            return f"give {source} a route to {target}, or set FLOTILLA_HOST there to an address in a common network"
        case "not_believed":
            return f"FLOTILLA_TLS_CA of {source} must name the authority that signed the certificate of {target}"
        case "another":
            return f"{target} is the address of another machine or program too: set FLOTILLA_HOST and FLOTILLA_PORT"
    return f"see the logs of both ends, and {REACHING}"


def _addresses(evidence: Evidence) -> Iterator[FleetFinding]:
    if len({each.machine for each in evidence.asked} - {""}) < 2:
        return
    for member in evidence.asked:
        if is_of_each_machine(member.host):
            yield _finding(
                "failed",
                "address",
                member,
                tried="compared the addresses of all services",
                found=f"it registers as {member.host}, which means something else on each machine",
                advice="set FLOTILLA_HOST there to the address at which other machines reach it",
            )


def _clock(member: Member, answer: Answer) -> Iterator[FleetFinding]:
    skew, error = answer.skew
    if abs(skew) - error <= SKEW_SECONDS:
        return
    yield _finding(
        "failed" if abs(skew) - error > FATAL_SKEW_SECONDS else "warning",
        "clock",
        member,
        tried="compared its clock with the gateway's",
        found=f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}, to within {error:.2f} s",
        advice="set the clock by NTP (chrony, systemd-timesyncd): certificates, logs and traces go by it",
    )


def _release(member: Member, facts: HostFacts, own: HostFacts) -> Iterator[FleetFinding]:
    if facts.code != own.code or facts.release != own.release:
        is_near = are_neighbours(facts.release, own.release)
        of = "messages differ too" if facts.schemas != own.schemas else "messages are the same"
        yield _finding(
            "warning" if is_near else "failed",
            "release",
            member,
            tried="compared releases and sources",
            found=f"it has {facts.release} ({facts.code}), the gateway {own.release} ({own.code}); {of}",
            advice="finish the upgrade" if is_near else "two minor versions do not work together: upgrade one of them",
        )
    elif facts.is_changed:
        yield _finding(
            "warning",
            "release",
            member,
            tried="compared the age of its sources with its own",
            found="sources were written after it began",
            advice="start it again: it runs what was there before",
        )


def are_neighbours(one: str, other: str) -> bool:
    """Whether two releases work together: the same minor version, or the one before."""
    try:
        (major, minor), (other_major, other_minor) = (
            [int(part) for part in each.split(".")[:2]] for each in (one, other)
        )
    except ValueError:
        return one == other
    return major == other_major and abs(minor - other_minor) <= 1


def _redis(member: Member, facts: HostFacts) -> Iterator[FleetFinding]:
    if facts.redis_problem is not None:
        yield _finding(
            "failed",
            "redis",
            member,
            tried="asked Redis for a sign of life from there",
            found=facts.redis_problem,
            advice="let it reach the address in FLOTILLA_REDIS_URL; user and password are those of its kind of service",
        )


def _folder(member: Member, facts: HostFacts, is_unseen: bool, reached: Answer | None) -> Iterator[FleetFinding]:
    unseen = () if reached is None else reached.report.unseen
    if facts.folder_problem is not None:
        found = f"it cannot write there: {facts.folder_problem}"
    elif is_unseen:
        found = "the gateway does not see what it wrote: its folder is another one of the same name"
    elif unseen:
        found = f"it does not see what {', '.join(unseen[:4])} wrote"
    else:
        return
    yield _finding(
        "failed" if member.kind is ServiceKind.TRAINER else "warning",
        "folder",
        member,
        tried="wrote a file into the gateway's data directory",
        found=found,
        advice=f"mount {FILES}; without it only its own samples and checkpoints stay on its disk",
    )


def _ports(member: Member, facts: HostFacts) -> Iterator[FleetFinding]:
    if facts.port_problem is not None:
        yield _finding(
            "failed",
            "ports",
            member,
            tried="listened as weight transfers do",
            found=facts.port_problem,
            advice="FLOTILLA_HOST must be an address of that machine, and FLOTILLA_PORTS a range with free ports",
        )
    elif facts.free_ports is not None and facts.free_ports < LEAST_PORTS:
        yield _finding(
            "warning",
            "ports",
            member,
            tried=f"counted the free ports of FLOTILLA_PORTS={facts.port_range}",
            found=f"{facts.free_ports} are free",
            advice="make the range larger: each service takes up to four, and those of dead connections stay a minute",
        )


def _room(member: Member, facts: HostFacts) -> Iterator[FleetFinding]:
    if facts.temporary_free_bytes < LEAST_TEMPORARY_BYTES:
        yield _finding(
            "warning",
            "disk",
            member,
            tried=f"looked at {facts.temporary}",
            found=f"{facts.temporary_free_bytes / GIBIBYTE:.1f} GB are free",
            advice="make room, or set TMPDIR to a larger disk",
        )
    if member.kind not in MAPS:
        return
    free, total = facts.shared_memory_free_bytes, facts.shared_memory_bytes
    if free is None or free < LEAST_SHARED_BYTES:
        yield _finding(
            "warning",
            "shared_memory",
            member,
            tried="looked at /dev/shm",
            found="there is none"
            if free is None
            else f"{free / GIBIBYTE:.1f} of {(total or 0) / GIBIBYTE:.1f} GB free",
            advice="weights are there about four times: docker run --shm-size=8g, or emptyDir {medium: Memory}",
        )


def _devices(member: Member, facts: HostFacts) -> Iterator[FleetFinding]:
    for each in facts.orphans:
        what = each.command or "a process outside of this container"
        holds = f", which holds {each.memory_bytes / GIBIBYTE:.1f} GB of {', '.join(each.devices)}"
        yield _finding(
            "failed" if each.devices and each.command.startswith("flotilla.") else "warning",
            "devices",
            member,
            tried="looked for processes without an owner, and for who holds devices",
            found=f"pid {each.pid}: {what}{holds if each.devices else ''}",
            advice="end it there, once you know that nobody needs it",
        )
