"""Run a sandbox service: ``python -m services.sandbox``."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Mapping

import psutil
from pydantic import SecretStr, ValidationError

from services.sandbox.app import create_app
from services.sandbox.settings import SandboxSettings
from services.sandbox.state import SandboxState, open_state
from shared.client import GatewayClient
from shared.errors import FlotillaError, InvalidRequest
from shared.membership import Membership
from shared.processes import die_with_parent
from shared.schemas.service import Capabilities, DesiredState, ObservedState, Registration, ServiceKind
from shared.service_app import at_work
from shared.serving import address_of, bind, serve
from shared.settings import ServiceSettings, read_settings
from shared.telemetry.logging import configure_logging

TRUE = {"1", "true", "yes"}
VARIABLES = {
    "level": "FLOTILLA_SANDBOX_LEVEL",
    "concurrency": "FLOTILLA_SANDBOX_CONCURRENCY",
    "python": "FLOTILLA_SANDBOX_PYTHON",
}


class Waiting:
    """Nothing to follow: a sandbox serves whoever calls it with the token."""

    def __init__(self) -> None:
        self.tell = lambda: None

    def observe(self) -> ObservedState:
        """Say that it is there."""
        return ObservedState()

    async def apply(self, desired: DesiredState) -> None:
        """Take note of nothing."""

    async def run(self) -> None:
        """Do nothing, for as long as the service lives."""
        await asyncio.Event().wait()


def sandbox_settings(token: str, environment: Mapping[str, str]) -> SandboxSettings:
    """Read ``FLOTILLA_SANDBOX_*`` and ``FLOTILLA_UNSAFE_SANDBOX``.

    Raises:
        InvalidRequest: a value is not allowed; the detail names the variable.
    """
    values = {name: environment[variable] for name, variable in VARIABLES.items() if environment.get(variable)}
    is_unsafe = environment.get("FLOTILLA_UNSAFE_SANDBOX", "").lower() in TRUE
    try:
        return SandboxSettings.model_validate({**values, "token": SecretStr(token), "unsafe_sandbox": is_unsafe})
    except ValidationError as error:
        item = error.errors()[0]
        name = VARIABLES.get(str(item["loc"][0]), "FLOTILLA_TOKEN")
        raise InvalidRequest(f"{name}: {item['msg']}") from None


def main() -> int:
    """Read settings, configure logging, serve; a refusal is one sentence and exit code 2."""
    try:
        settings = read_settings()
        die_with_parent(settings.parent_pid)
        configure_logging("sandbox", settings.log_level)
        listening = bind(settings.host, settings.port)
        address = address_of(listening)

        @contextlib.asynccontextmanager
        async def open_and_register(sandbox: SandboxSettings) -> AsyncIterator[SandboxState]:
            async with open_state(sandbox) as state, _member(settings, address):
                yield state

        serve(create_app(sandbox_settings(settings.token, os.environ), open_and_register), listening)
    except FlotillaError as error:
        sys.stderr.write(f"sandbox: {error.detail}\n")
        return 2
    return 0


@contextlib.asynccontextmanager
async def _member(settings: ServiceSettings, address: str) -> AsyncIterator[None]:
    registration = Registration(
        kind=ServiceKind.SANDBOX,
        address=address,
        host=socket.gethostname(),
        pid=os.getpid(),
        capabilities=Capabilities(cores=os.cpu_count() or 1, memory_bytes=psutil.virtual_memory().total),
        incarnation=secrets.token_hex(8),
    )
    waiting = Waiting()
    async with GatewayClient(settings.gateway_url, settings.token) as client:
        membership = Membership(client, registration, waiting.observe, waiting.apply)
        async with at_work(waiting, membership):
            yield


if __name__ == "__main__":
    sys.exit(main())
