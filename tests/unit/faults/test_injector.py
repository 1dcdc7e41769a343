"""When a fault happens, and what each kind does to the process that it happens in."""

import asyncio
import errno
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from flotilla.shared.clock import SystemClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.faults import armed as armed_module
from flotilla.shared.faults import injector as injector_module
from flotilla.shared.faults.armed import arm, arm_from, armed, disarm
from flotilla.shared.faults.http import FaultyApp
from flotilla.shared.faults.injector import Injector
from flotilla.shared.faults.plan import parse_plan
from flotilla.shared.faults.sites import Site
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.server.serving import problem_response


@pytest.fixture
def armed_process() -> Iterator[None]:
    yield
    disarm()


def injector(text: str, process: str = "rollout") -> Injector:
    return Injector(process, parse_plan(text))


def refusals(faults: Injector, count: int) -> list[bool]:
    """Reach a site so often, and say at which times it was refused."""
    found = []
    for _ in range(count):
        try:
            faults.hit(Site.REWARD_SCORE)
            found.append(False)
        except Unavailable:
            found.append(True)
    return found


def test_nth_counts_from_one() -> None:
    assert refusals(injector("reward.score refuse nth=3"), 4) == [False, False, True, False]


def test_a_probability_gives_the_same_draws_for_the_same_seed() -> None:
    first, again, other = (
        refusals(injector(f"reward.score refuse probability=0.5 seed={seed}"), 64) for seed in (1, 1, 2)
    )

    assert first == again != other
    assert 16 < sum(first) < 48


def test_times_bounds_how_often_it_happens() -> None:
    assert refusals(injector("reward.score refuse times=2"), 4) == [True, True, False, False]


def test_processes_with_marks_count_together(tmp_path: Path) -> None:
    text = f"marks={tmp_path}; reward.score refuse times=3"
    first, second = injector(text), injector(text, "reward")

    assert refusals(first, 2) + refusals(second, 2) + refusals(first, 1) == [True, True, True, False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1", "1-2", "1-3"]


def test_a_file_beside_the_marks_switches_a_fault(tmp_path: Path) -> None:
    faults = injector(f"marks={tmp_path}; reward.score refuse while=no-reward nth=2")
    assert refusals(faults, 3) == [False] * 3

    (tmp_path / "no-reward").touch()

    assert refusals(faults, 3) == [False, True, False]
    (tmp_path / "no-reward").unlink()
    assert refusals(faults, 3) == [False] * 3


def test_after_seconds_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = injector("reward.score refuse after_seconds=5")
    before = refusals(faults, 2)
    start = time.monotonic()
    monkeypatch.setattr(injector_module.time, "monotonic", lambda: start + 6)

    assert before == [False, False]
    assert refusals(faults, 2) == [True, True]


def test_a_fault_of_another_process_does_not_happen_here() -> None:
    assert not injector("reward.score refuse in=trainer").faults
    assert refusals(injector("reward.score refuse in=trainer"), 1) == [False]


def test_a_full_disk_is_an_os_error_of_that_number() -> None:
    with pytest.raises(OSError) as caught:
        injector("checkpoint.write disk_full").hit(Site.CHECKPOINT_WRITE)

    assert caught.value.errno == errno.ENOSPC


async def test_a_stall_stops_everything_and_slowness_one_operation() -> None:
    async def turns(text: str) -> int:
        faults = injector(text)
        doing = asyncio.create_task(faults.reach(Site.FORWARD))
        turns = 0
        while not doing.done():
            await asyncio.sleep(0.005)
            turns += 1
        return turns

    assert await turns("streams.forward stall seconds=0.05") == 1
    # Another process may take the time of one; then another one.
    assert any([await turns("streams.forward slow seconds=0.03") > 1 for _ in range(5)])


async def test_around_repeats_or_loses_what_was_done() -> None:
    done: list[str] = []

    async def operation() -> int:
        done.append("done")
        return len(done)

    assert await injector("streams.forward duplicate nth=1").around(Site.FORWARD, operation) == 2
    with pytest.raises(TimeoutError):
        await injector("streams.forward refuse phase=after").around(Site.FORWARD, operation, refusal=TimeoutError)
    assert len(done) == 3
    with pytest.raises(TimeoutError):
        await injector("streams.forward refuse").around(Site.FORWARD, operation, refusal=TimeoutError)
    assert len(done) == 3


async def test_reordered_entries_all_arrive_and_a_late_one_later() -> None:
    shuffled = injector("streams.delivery reorder").delivered("me", list(range(20)))
    faults = injector("streams.delivery reorder seconds=0.02 nth=1")
    early = faults.delivered("me", [1, 2, 3])
    others = faults.delivered("someone else", [])
    await asyncio.sleep(0.03)

    assert shuffled != sorted(shuffled) == list(range(20))
    assert len(early) == 2
    assert others == []
    assert sorted(early + faults.delivered("me", [])) == [1, 2, 3]


def test_slices_choose_the_place_in_a_broadcast() -> None:
    faults = injector("weights.send slow seconds=0 slices=2")
    reached = [bool(faults._due(Site.WEIGHTS_SEND, slices=number)) for number in range(4)]

    assert reached == [False, False, True, False]
    assert list(faults.each_slice(Site.WEIGHTS_RECEIVE, "abc")) == ["a", "b", "c"]


@pytest.mark.usefixtures("armed_process")
def test_the_clock_is_off_from_its_time_on() -> None:
    arm(parse_plan("clock.now skew seconds=-3600 nth=2"), "gateway")
    clock = SystemClock()

    assert abs(clock.now() - time.time()) < 1
    assert abs(clock.now() + 3600 - time.time()) < 1
    assert abs(clock.now() + 3600 - time.time()) < 1


@pytest.mark.usefixtures("armed_process")
def test_nothing_is_armed_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    arm_from({}, "gateway")

    assert armed() is None
    arm_from({"FLOTILLA_FAULTS": "engine.step kill in=engine"}, "engine")
    assert armed() is not None
    assert "FAULT INJECTION IS ON" in caplog.text


def test_an_unarmed_site_costs_next_to_nothing() -> None:
    assert armed_module.armed() is None

    assert min(timeit.repeat(armed_module.armed, number=10_000, repeat=5)) < 0.01


@pytest.mark.usefixtures("armed_process")
async def test_a_call_of_the_gateway_is_sent_twice_with_the_same_key_or_its_answer_lost() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx.Response(200, json=len(keys))

    async with GatewayClient("http://gateway", "token", transport=httpx.MockTransport(answer)) as client:
        arm(
            parse_plan("client.call duplicate nth=1 path=/v1/a; client.call refuse nth=1 phase=after path=/v1/b"),
            "rollout",
        )
        assert await client.call("POST", "/v1/a") == 2
        assert await client.call("POST", "/v1/b") == 4

    assert keys[0] == keys[1] != keys[2] == keys[3]


async def test_a_request_is_refused_or_never_answered() -> None:
    app = FastAPI()

    @app.get("/{path}")
    async def route(path: str) -> str:
        return path

    faults = injector("http.request refuse path=/a nth=1; http.request half_open path=/b")
    transport = httpx.ASGITransport(FaultyApp(app, faults, problem_response))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        refused, answered = await client.get("/a"), await client.get("/a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await client.get("/b")

    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert answered.json() == "a"
