"""A member registers, acknowledges what it took in, and comes back after the gateway forgot it."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.checks import CheckOrder
from flotilla.shared.schemas.service import DesiredState, ObservedState, Registration, ServiceKind, WorkState
from flotilla.shared.service import membership
from flotilla.shared.service.membership import Membership


class ScriptedGateway:
    """Answers registrations and status calls; a poll waits until ``tag`` differs from what was acknowledged."""

    def __init__(self) -> None:
        self.registrations = 0
        self.known: set[str] = set()
        self.observed: list[ObservedState] = []
        self.waits: list[float] = []
        self.tag = "first"
        self.left: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.registrations += 1
            self.known.add(f"s{self.registrations}")
            return httpx.Response(201, json={"service_id": f"s{self.registrations}", "lease_seconds": 5})
        service_id = request.url.path.split("/")[3]
        if request.method == "DELETE":
            self.left.append(service_id)
            return httpx.Response(204)
        if service_id not in self.known:
            return httpx.Response(404, json={"code": "not_found", "detail": "unknown service"})
        observed = ObservedState.model_validate(json.loads(request.content))
        self.observed.append(observed)
        self.waits.append(float(request.url.params["wait"]))
        if float(request.url.params["wait"]) > 0:
            while observed.acknowledged == self.tag and service_id in self.known:
                await asyncio.sleep(0.001)
        if service_id not in self.known:
            return httpx.Response(404, json={"code": "not_found", "detail": "unknown service"})
        return httpx.Response(200, json=DesiredState(tag=self.tag, state=WorkState.IDLE).model_dump(mode="json"))

    async def until(self, condition: "object") -> None:
        async with asyncio.timeout(2):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.001)


def a_member(gateway: ScriptedGateway, applied: list[str], through: Any = None) -> Membership:
    client = GatewayClient("http://gateway", "t", transport=httpx.MockTransport(through or gateway))

    async def apply(desired: DesiredState) -> None:
        applied.append(desired.tag)

    registration = Registration(kind=ServiceKind.REWARD, address="http://r", host="h", pid=1, incarnation="i")
    return Membership(client, registration, ObservedState, apply, poll_seconds=1)


async def test_each_desired_state_is_applied_once_and_acknowledged() -> None:
    gateway, applied = ScriptedGateway(), list[str]()
    running = asyncio.create_task(a_member(gateway, applied).run())
    await gateway.until(lambda: any(o.acknowledged == "first" for o in gateway.observed))

    gateway.tag = "second"

    await gateway.until(lambda: any(o.acknowledged == "second" for o in gateway.observed))
    assert applied == ["first", "second"]
    # What a poll brought the next poll acknowledges: no call is made for that alone.
    assert gateway.waits == [1.0, 1.0, 1.0]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("seconds", [0.0, 0.02])
async def test_what_comes_of_news_goes_with_the_next_poll(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "JOIN_SECONDS", 1.0)
    gateway, versions = ScriptedGateway(), list[int]()
    client = GatewayClient("http://gateway", "t", transport=httpx.MockTransport(gateway))

    def serve() -> None:
        versions.append(len(versions))
        member.notify()

    async def apply(_: DesiredState) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, serve)
        else:
            serve()

    registration = Registration(kind=ServiceKind.ROLLOUT, address="http://r", host="h", pid=1, incarnation="i")
    member = Membership(client, registration, lambda: ObservedState(policy_version=len(versions)), apply)
    running = asyncio.create_task(member.run())
    await gateway.until(lambda: len(gateway.observed) == 2)
    gateway.tag = "second"
    await gateway.until(lambda: len(gateway.observed) == 3)

    # What happens while a call waits is told at once.
    serve()
    await gateway.until(lambda: len(gateway.observed) == 4)

    assert [each.policy_version for each in gateway.observed] == [0, 1, 2, 3]
    assert [each.acknowledged for each in gateway.observed] == [None, "first", "second", "second"]
    assert [each.number for each in gateway.observed] == [1, 2, 3, 4], "the gateway knows which it said last"
    assert gateway.waits == [membership.POLL_SECONDS] * 3 + [0.0]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_nothing_that_comes_of_news_is_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "JOIN_SECONDS", 0.01)
    gateway, applied = ScriptedGateway(), list[str]()
    running = asyncio.create_task(a_member(gateway, applied).run())
    await gateway.until(lambda: [each.acknowledged for each in gateway.observed] == [None, "first"])

    assert gateway.waits == [1.0, 1.0]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_member_that_was_forgotten_registers_again() -> None:
    gateway, applied = ScriptedGateway(), list[str]()
    running = asyncio.create_task(a_member(gateway, applied).run())
    await gateway.until(lambda: applied == ["first"])

    gateway.known.clear()

    await gateway.until(lambda: gateway.registrations == 2 and applied == ["first", "first"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gateway.left == ["s2"]


async def test_a_member_shows_its_pass_and_registers_again_with_its_token_when_that_has_expired() -> None:
    gateway, applied, shown, valid = ScriptedGateway(), list[str](), list[tuple[str, str]](), {"pass 1"}

    async def answer(request: httpx.Request) -> httpx.Response:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        shown.append((request.method, token))
        if request.method == "POST":
            response = await gateway(request)
            given = {"token": f"pass {gateway.registrations}", "accepts": ["x"], "peers": {"sandbox": "peer"}}
            return httpx.Response(201, json=response.json() | given)
        if token not in valid:
            return httpx.Response(401, json={"code": "unauthorized", "detail": "expired"})
        response = await gateway(request)
        response.headers["Flotilla-Token"] = "pass 1, renewed"
        return response

    client = GatewayClient("http://gateway", "given", transport=httpx.MockTransport(answer))

    async def apply(desired: DesiredState) -> None:
        applied.append(desired.tag)

    registration = Registration(kind=ServiceKind.REWARD, address="http://r", host="h", pid=1, incarnation="i")
    credentials = Credentials("given")
    member = Membership(client, registration, ObservedState, apply, credentials=credentials, poll_seconds=0.05)
    member.call_seconds = 0.05
    valid.add("pass 1, renewed")
    running = asyncio.create_task(member.run())
    await gateway.until(lambda: ("PUT", "pass 1, renewed") in shown)
    assert credentials.for_peer(ServiceKind.SANDBOX) == "peer"
    valid.clear()
    valid.add("pass 2")

    await gateway.until(lambda: ("PUT", "pass 2") in shown)

    assert {token for method, token in shown if method == "POST"} == {"given"}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_call_that_is_repeated_after_an_absence_tells_what_is_observed_then() -> None:
    gateway, version, is_away = ScriptedGateway(), 7, False

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal version
        if is_away and request.method == "PUT":
            version += 1
            raise httpx.ConnectError("refused")
        return await gateway(request)

    async def apply(_: DesiredState) -> None:
        return

    client = GatewayClient("http://gateway", "t", transport=httpx.MockTransport(answer))
    registration = Registration(kind=ServiceKind.ROLLOUT, address="http://r", host="h", pid=1, incarnation="i")
    member = Membership(client, registration, lambda: ObservedState(policy_version=version), apply, poll_seconds=1)
    await member._registered()
    is_away = True
    polling = asyncio.create_task(member._poll("s1"))
    await gateway.until(lambda: version > 7)
    is_away = False

    await polling

    assert gateway.observed[-1].policy_version == version > 7


async def test_a_gateway_that_does_not_answer_is_named_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="flotilla.shared.service.membership")
    gateway, applied, is_away = ScriptedGateway(), list[str](), True

    async def sometimes(request: httpx.Request) -> httpx.Response:
        # A refusal that is not repeated: no deadline has to pass.
        return (
            httpx.Response(422, json={"code": "invalid_request", "detail": "away"})
            if is_away
            else await gateway(request)
        )

    monkeypatch.setattr(membership, "LONGEST_PAUSE_SECONDS", 0.01)
    running = asyncio.create_task(a_member(gateway, applied, sometimes).run())
    async with asyncio.timeout(5):
        while not caplog.messages:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        is_away = False
        while "the gateway answers again" not in caplog.messages:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert caplog.messages == [
        "the gateway does not answer; it is asked until it does",
        "service is registered",
        "the gateway answers again",
    ]
    assert caplog.records[0].__dict__["gateway"] == "http://gateway"


async def test_an_answer_that_was_overtaken_is_not_applied() -> None:
    gateway, applied = ScriptedGateway(), list[str]()
    may_arrive = asyncio.Event()

    async def late_poll(request: httpx.Request) -> httpx.Response:
        response = await gateway(request)
        if request.method == "PUT" and float(request.url.params["wait"]) > 0 and len(applied) == 1:
            await may_arrive.wait()
        return response

    member = a_member(gateway, applied, late_poll)
    running = asyncio.create_task(member.run())
    await gateway.until(lambda: applied == ["first"])
    await gateway.until(lambda: any(each.acknowledged == "first" for each in gateway.observed))

    gateway.tag = "second"  # the poll takes this to the service, slowly
    await asyncio.sleep(0.01)
    gateway.tag = "third"
    member.notify()
    await gateway.until(lambda: applied == ["first", "third"])
    may_arrive.set()
    gateway.tag = "fourth"
    await gateway.until(lambda: applied[-1] == "fourth")

    assert applied == ["first", "third", "fourth"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_gauge_that_appears_is_reported_soon_and_so_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "GAUGE_SECONDS", 0.01)
    gateway, gauges = ScriptedGateway(), dict[str, float]()
    member = a_member(gateway, [])
    member._gauges = lambda: gauges
    running = asyncio.create_task(member.run())
    await gateway.until(lambda: any(o.acknowledged == "first" for o in gateway.observed))

    def told() -> dict[str, float]:
        load = gateway.observed[-1].load
        return {name: value for name, value in load.items() if not name.startswith("memory/")}

    gauges["redis_silent_seconds"] = 7.0
    await gateway.until(lambda: told() == {"redis_silent_seconds": 7.0})
    gauges.clear()
    await gateway.until(lambda: told() == {})
    assert gateway.observed[-1].load["memory/service"] > 1 << 20

    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_what_a_later_gateway_asks_for_is_neither_done_nor_a_reason_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "LONGEST_PAUSE_SECONDS", 0.01)
    gateway, applied, states = ScriptedGateway(), list[str](), ["idle"]

    async def of_later(request: httpx.Request) -> httpx.Response:
        response = await gateway(request)
        if request.method != "PUT" or response.status_code != 200:
            return response
        return httpx.Response(200, json=response.json() | {"state": states[-1]})

    member = a_member(gateway, applied, of_later)
    running = asyncio.create_task(member.run())
    await gateway.until(lambda: applied == ["first"])

    states.append("hibernating")
    gateway.tag = "second"
    called = len(gateway.observed)
    await gateway.until(lambda: len(gateway.observed) > called + 5)
    assert applied == ["first"] and member.is_connected and not running.done()
    assert sum("this release does not know" in each.message for each in caplog.records) == 1

    states.append("idle")
    await gateway.until(lambda: applied == ["first", "second"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_order_that_cannot_be_followed_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        asked = 0

        async def answer(self, *_: object) -> None:
            self.asked += 1
            raise OverflowError("a port is beyond all ports")

        def close(self) -> None:
            pass

    gateway, checker = ScriptedGateway(), Failing()
    member = a_member(gateway, [])
    member._checker = checker  # type: ignore[assignment]
    running = asyncio.create_task(member.run())

    for number in (1, 2):
        member._note_check(CheckOrder(check_id=f"a{number}", phase=1, sent_at=0.0))
        await gateway.until(lambda expected=number: checker.asked == expected)
    await asyncio.sleep(0)

    assert not running.done() and sum("no answer from here" in each for each in caplog.messages) == 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
