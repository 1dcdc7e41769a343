"""A sandbox service over this machine or a fake provider, asked over HTTP."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from flotilla.services.sandbox import state as state_module
from flotilla.services.sandbox.app import create_app
from flotilla.services.sandbox.boxes.opening import open_boxes
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import SandboxState, open_state
from tests.contract.sandbox.fakes.boxes import FakeProvider
from tests.contract.sandbox.fakes.daytona import FakeDaytona
from tests.contract.sandbox.fakes.docker import FakeDocker
from tests.contract.sandbox.fakes.e2b import FakeE2B
from tests.contract.sandbox.fakes.kubernetes import FakeKubernetes
from tests.integration.sandbox.running import TOKEN

FAKES: dict[str, type[FakeProvider]] = {
    "docker": FakeDocker,
    "e2b": FakeE2B,
    "daytona": FakeDaytona,
    "kubernetes": FakeKubernetes,
}
if importlib.util.find_spec("modal") is not None:  # the fake is made of the package's own stubs
    from tests.contract.sandbox.fakes.modal import FakeModal

    FAKES["modal"] = FakeModal


def settings_for(provider: str, **fields: Any) -> SandboxSettings:
    usual: dict[str, Any] = {"token": TOKEN, "provider": provider, "concurrency": 2, "sessions": 2, "spare": 0}
    if provider != "local":
        usual["warm"] = 0
    if provider not in {"local", "docker"}:
        usual["key"] = SecretStr(FAKES[provider].key)
    if provider == "local":
        fields.pop("images", None)
    return SandboxSettings.model_validate(usual | fields)


@asynccontextmanager
async def a_service(
    provider: str, root: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeProvider | None = None, **fields: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, SandboxState, FakeProvider]]:
    """Open a service and a client of it; the fake of ``local`` is there and is not asked."""
    fake = fake or FAKES.get(provider, FakeProvider)(root)
    monkeypatch.setattr(state_module, "open_boxes", lambda settings, slots: open_boxes(settings, slots, transport=fake))
    async with AsyncExitStack() as stack:
        if (serving := fake.serving()) is not None:
            fields = {"url": await stack.enter_async_context(serving)} | fields
        settings = settings_for(provider, **fields)
        state = await stack.enter_async_context(open_state(settings))

        @asynccontextmanager
        async def opened(_settings: SandboxSettings) -> AsyncIterator[SandboxState]:
            yield state

        app = create_app(settings, opened)
        async with app.router.lifespan_context(app) as given:

            async def with_state(scope: Any, receive: Any, send: Any) -> None:
                await app({**scope, "state": given}, receive, send)

            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app=with_state),
                base_url="http://sandbox",
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=60.0,
            ) as client:
                yield client, state, fake
