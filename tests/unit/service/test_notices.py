"""A machine that will be taken away says so; its service leaves while there is time, whoever else tells it to end."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from fastapi import FastAPI

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.serving import NOTICE, bind, serve_here
from flotilla.shared.schemas.service import LINK_LOCAL, Cloud, NoticeSource, is_spot, notices_from, pool_from
from flotilla.shared.service import notices
from flotilla.shared.service.notices import END_SECONDS, LOOK_SECONDS, Departure, Metadata, watch_notices
from tests.cloud import GCP_PREEMPTED, Answers, Cloudlike, cloudlike

NOW = datetime(2026, 11, 27, 20, 0, 0, tzinfo=UTC)
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.fixture
def cloud() -> Iterator[Cloudlike]:
    with cloudlike() as server:
        yield server


@contextmanager
def metadata(kind: Cloud, url: str) -> Iterator[Metadata]:
    asked = Metadata(NoticeSource(kind, url), now=NOW.timestamp)
    try:
        yield asked
    finally:
        asked.close()


def azure(kind: str, *machines: str, at: str) -> tuple[int, str]:
    event = {"EventId": "e", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": machines}
    return 200, json.dumps(
        {"DocumentIncarnation": 2, "Events": [event | {"EventStatus": "Scheduled", "NotBefore": at}]}
    )


IN_90 = datetime.fromtimestamp(NOW.timestamp() + 90, UTC)
AZURE_AT = format_datetime(IN_90, usegmt=True)
NAMED: Answers = {AZURE_NAME: (200, "worker-1")}


@pytest.mark.parametrize(
    ("kind", "answers", "left"),
    [
        (Cloud.AWS, {}, None),
        (Cloud.AWS, {AWS_ACTION: (200, '{"action": "terminate", "time": "2026-11-27T20:02:00Z"}')}, 120.0),
        (Cloud.AWS, {AWS_ACTION: (200, '{"action": "stop", "time": "2026-11-27T19:59:00Z"}')}, 0.0),
        (Cloud.GCP, {GCP_PREEMPTED: (200, "FALSE")}, None),
        (Cloud.GCP, {GCP_PREEMPTED: (200, "TRUE")}, 30.0),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: (200, '{"DocumentIncarnation": 1, "Events": []}')}, None),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: azure("Preempt", "worker-1", at=AZURE_AT)}, 90.0),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: azure("Preempt", "worker-2", at=AZURE_AT)}, None),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: azure("Freeze", "worker-1", at=AZURE_AT)}, None),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: azure("Terminate", "worker-1", at="")}, 0.0),
    ],
)
def test_each_cloud_is_asked_as_it_documents(cloud: Cloudlike, kind: Cloud, answers: Answers, left: float) -> None:
    cloud.answers = answers

    with metadata(kind, cloud.url) as asked:
        assert asked.seconds_left() == left


def test_a_token_of_aws_that_has_ended_is_made_again(cloud: Cloudlike) -> None:
    with metadata(Cloud.AWS, cloud.url) as asked:
        assert asked.seconds_left() is None
        cloud.tokens.append("another")
        cloud.answers = {AWS_ACTION: (200, '{"action": "terminate", "time": "2026-11-27T20:02:00Z"}')}

        assert [asked.seconds_left(), asked.seconds_left()] == [None, 120.0]


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (Cloud.AWS, {AWS_ACTION: (200, "no JSON")}),
        (Cloud.AWS, {AWS_ACTION: (200, '["terminate"]')}),
        (Cloud.AWS, {AWS_ACTION: (500, "")}),
        (Cloud.GCP, {}),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: (200, '{"Events": [{}]}')}),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: azure("Preempt", "worker-1", at="soon")}),
        (Cloud.AZURE, {**NAMED, AZURE_EVENTS: (302, "")}),
    ],
)
def test_what_is_no_documented_answer_is_no_notice(cloud: Cloudlike, kind: Cloud, answers: Answers) -> None:
    cloud.answers = answers

    with metadata(kind, cloud.url) as asked, pytest.raises(OSError):
        asked.seconds_left()


def test_a_notice_is_told_again_though_the_metadata_were_away(
    cloud: Cloudlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LOOK_SECONDS", 0.02)
    heard: list[float] = []
    told = threading.Event()
    end = watch_notices(NoticeSource(Cloud.GCP, cloud.url), lambda left: (heard.append(left), told.set())[0])

    assert not told.wait(0.2)  # it answers 404 so far
    cloud.answers = {GCP_PREEMPTED: (200, "TRUE")}

    assert told.wait(10)
    told.clear()
    assert told.wait(10), "who was not there yet to be told is told again"
    end()
    assert set(heard) == {30.0}


def test_a_notice_that_is_there_already_is_told_at_once(cloud: Cloudlike) -> None:
    cloud.answers = {GCP_PREEMPTED: (200, "TRUE")}
    told = threading.Event()

    end = watch_notices(NoticeSource(Cloud.GCP, cloud.url), lambda _: told.set())

    assert told.wait(LOOK_SECONDS * 0.9)
    end()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"FLOTILLA_NOTICES": "digitalocean"}, "FLOTILLA_NOTICES must be aws, gcp, azure or none, got 'digitalocean'"),
        ({"FLOTILLA_NOTICES": "aws", "FLOTILLA_METADATA_URL": "169.254.169.254"}, "must be an address such as http://"),
        ({"FLOTILLA_NOTICES": "aws", "FLOTILLA_METADATA_URL": "http://u@h"}, "must be an address such as http://"),
    ],
)
def test_a_wrong_source_is_refused(values: Mapping[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        notices_from(values)


def test_nobody_is_asked_unless_a_cloud_is_named() -> None:
    assert notices_from({}) is None and notices_from({"FLOTILLA_NOTICES": "none"}) is None
    assert notices_from({"FLOTILLA_NOTICES": "AWS"}) == NoticeSource(Cloud.AWS, LINK_LOCAL)


def test_a_pool_has_a_name_and_spot_ones_begin_with_it() -> None:
    assert [is_spot(each) for each in ("spot", "spot-a100", "spotted", "on-demand", None)] == [True, True, *[False] * 3]
    assert pool_from({}) is None and pool_from({"FLOTILLA_POOL": "spot-a100"}) == "spot-a100"
    with pytest.raises(InvalidRequest, match="FLOTILLA_POOL must be a name of up to 64 small letters"):
        pool_from({"FLOTILLA_POOL": "Spot nodes"})


class Leaver:
    """A service's app, what it is told to leave within, and when it is done."""

    def __init__(self, departure: Departure) -> None:
        self.departure = departure
        self.told: list[float] = []
        self.may_go = asyncio.Event()

    async def leave(self, _: FastAPI) -> None:
        self.told.append(self.departure.begin())
        await self.may_go.wait()


async def until_told(leaver: Leaver, count: int) -> None:
    async with asyncio.timeout(10):
        while len(leaver.told) < count:
            await asyncio.sleep(0.01)


async def test_the_signal_of_a_shutdown_after_a_notice_takes_no_work_away() -> None:
    leaver = Leaver(Departure(notice_seconds=25.0))
    serving = asyncio.create_task(serve_here(FastAPI(), bind("127.0.0.1", 0), leaver.leave))
    await asyncio.sleep(0.2)

    leaver.departure.hear(120.0)
    await until_told(leaver, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    await until_told(leaver, 2)
    await asyncio.sleep(0.1)
    assert not serving.done()
    leaver.may_go.set()
    await asyncio.wait_for(serving, 10)

    assert leaver.told == [pytest.approx(120.0 - END_SECONDS, abs=0.5), 25.0]


async def test_a_notice_after_the_signal_changes_nothing_and_a_second_signal_ends_it() -> None:
    leaver = Leaver(Departure(notice_seconds=25.0))
    serving = asyncio.create_task(serve_here(FastAPI(), bind("127.0.0.1", 0), leaver.leave))
    await asyncio.sleep(0.2)

    os.kill(os.getpid(), signal.SIGTERM)
    await until_told(leaver, 1)
    os.kill(os.getpid(), NOTICE)
    await asyncio.sleep(0.1)
    assert not serving.done() and leaver.told == [25.0]
    os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(serving, 10)


def test_a_departure_is_never_longer_than_the_machine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    departure = Departure(25.0)
    departure.hear(10.0)

    departure.hear(30.0)  # clouds say it anew at each look

    assert [round(departure.begin()) for _ in range(2)] == [5, 5]
