"""Sessions over HTTP."""

from tests.integration.sandbox.test_run_code import a_client


async def test_a_session_is_used_by_who_has_its_token() -> None:
    async with a_client(sessions=1, concurrency=1) as client:
        made = await client.post("/sessions", json={"files": {"in.txt": "aGk="}, "idle_seconds": 60})
        session = made.json()
        path, owner = f"/sessions/{session['id']}", {"Session-Token": session["token"]}
        first = await client.post(f"{path}/run", json={"code": "x = open('in.txt').read()\nx"}, headers=owner)
        second = await client.post(f"{path}/run", json={"code": "print(x * 2); 1 / 0"}, headers=owner)
        others = await client.post(f"{path}/run", json={"code": "x"}, headers={"Session-Token": "x" * 43})
        nobodys = await client.post(f"{path}/run", json={"code": "x"})
        without = await client.delete(path, headers={**owner, "Authorization": "Bearer wrong"})
        counted = await client.get("/metrics")
        closed = await client.delete(path, headers=owner)
        again = await client.delete(path, headers=owner)
        late = await client.post(f"{path}/run", json={"code": "x"}, headers=owner)
        afterwards = await client.get("/metrics")

    assert (made.status_code, session["idle_seconds"], session["isolation"]) == (201, 60.0, first.json()["isolation"])
    body = first.json()
    assert set(body) == {"status", "message", "run_result", "files", "isolation", "is_alive"}
    assert (body["status"], body["run_result"]["stdout"], body["is_alive"]) == ("Success", "'hi'\n", True)
    body = second.json()
    assert (body["status"], body["run_result"]["stdout"], body["is_alive"]) == ("Failed", "hihi\n", True)
    assert "ZeroDivisionError" in body["run_result"]["stderr"]
    assert [reply.status_code for reply in (others, nobodys, without)] == [404, 422, 401]
    assert [reply.status_code for reply in (closed, again, late)] == [204, 204, 410]
    assert late.json()["code"] == "session_ended"
    assert late.json()["detail"] == "it was closed by its owner"
    assert "flotilla_sandbox_sessions 1.0" in counted.text
    assert 'flotilla_sandbox_cells_total{status="Failed"} 1.0' in counted.text
    assert 'flotilla_sandbox_sessions_ended_total{cause="closed"} 1.0' in afterwards.text


async def test_a_sandbox_may_offer_none() -> None:
    async with a_client(sessions=0, concurrency=1) as client:
        reply = await client.post("/sessions", json={})
        health = await client.get("/healthz")

    assert reply.status_code == 503
    assert "FLOTILLA_SANDBOX_SESSIONS" in reply.json()["detail"]
    assert health.json()["sessions"] == 0
