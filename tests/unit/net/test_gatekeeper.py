import httpx
import pytest

from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.server.gatekeeper import Gatekeeper

TOKEN = "the right token"


async def echo(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def a_client() -> httpx.AsyncClient:
    app = Gatekeeper(echo, credentials=Credentials(TOKEN), max_bytes=10)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://sandbox")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_nothing_mutates_without_the_token(method: str, header: str | None) -> None:
    async with a_client() as client:
        headers = {} if header is None else {"Authorization": header}
        reply = await client.request(method, "/run_code", headers=headers, content=b"x")

    assert (reply.status_code, reply.json()["code"]) == (401, "unauthorized")
    assert reply.headers["content-type"] == "application/problem+json"


async def test_reading_needs_no_token() -> None:
    async with a_client() as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_the_body_passes_unchanged() -> None:
    async with a_client() as client:
        reply = await client.post("/x", headers={"Authorization": f"bearer {TOKEN}"}, content=b"0123456789")

    assert (reply.status_code, reply.content) == (200, b"0123456789")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_body_that_is_too_large_is_refused(is_streamed: bool) -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        yield b"01234"
        yield b"567890"

    async with a_client() as client:
        content = pieces() if is_streamed else b"01234567890"
        reply = await client.post("/x", headers={"Authorization": f"Bearer {TOKEN}"}, content=content)

    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


async def test_a_body_that_breaks_off_reaches_nobody() -> None:
    reached: list[object] = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        reached.append(scope)

    parts = iter([{"type": "http.request", "body": b"abc", "more_body": True}, {"type": "http.disconnect"}])
    said: list[object] = []

    async def receive():  # type: ignore[no-untyped-def]
        return next(parts)

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        said.append(message)

    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers}
    await Gatekeeper(app, credentials=Credentials(TOKEN), max_bytes=10)(scope, receive, send)

    assert (reached, said) == ([], [])
