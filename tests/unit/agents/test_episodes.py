"""Agents' calls go to the gateway that leads."""

import httpx

from flotilla.agents.episodes import Gateways


async def test_of_several_gateways_the_one_that_leads_is_asked_and_kept() -> None:
    leader, asked = "b", list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "gone":
            raise httpx.ConnectError("no route", request=request)
        if request.url.host == leader:
            return httpx.Response(201, json={"from": leader})
        return httpx.Response(503, json={"code": "not_leading"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateways = Gateways("http://gone,http://a, http://b/", client)
        first = [await gateways.post("/v1/x", "t", {}) for _ in range(2)]
        leader = "a"
        after = await gateways.post("/v1/x", "t", {})
        leader = "none"
        nobody = await gateways.post("/v1/x", "t", {})

    assert first == [(201, {"from": "b"})] * 2 and after == (201, {"from": "a"})
    assert nobody[0] in {0, 503}
    assert asked == ["gone", "a", "b", "b", "b", "gone", "a", "a", "b", "gone"]


async def test_the_next_gateway_can_tell_a_call_that_it_is_asked_again() -> None:
    keys = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if request.url.host == "slow":
            raise httpx.ReadTimeout("late", request=request)
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        gateways = Gateways("http://slow,http://b", client)
        for _ in range(2):
            assert await gateways.post("/v1/episodes/e/complete", "t", {"reward": 1.0}) == (200, {})

    assert len(keys) == 3 and keys[0] == keys[1] != keys[2]
