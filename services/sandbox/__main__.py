"""Run a sandbox service: ``python -P -m flotilla.services.sandbox``."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from flotilla.shared.children.processes import collecting_later

with collecting_later():
    from fastapi import FastAPI
    from pydantic import SecretStr, ValidationError

    from flotilla.services.sandbox.app import create_app
    from flotilla.services.sandbox.settings import KEY, SandboxSettings
    from flotilla.services.sandbox.spare_time import SpareTime
    from flotilla.services.sandbox.state import SandboxState, open_state
    from flotilla.shared.environment.settings import ServiceSettings, secret_from
    from flotilla.shared.errors import InvalidRequest
    from flotilla.shared.net.authorisation.tokens import Credentials
    from flotilla.shared.net.client.client import GatewayClient
    from flotilla.shared.schemas.service import DesiredState, ObservedState, Registration, ServiceKind, WorkState
    from flotilla.shared.service.app import at_work
    from flotilla.shared.service.devices import host_capabilities
    from flotilla.shared.service.main import run_service
    from flotilla.shared.service.membership import Membership

TRUE = {"1", "true", "yes"}
VARIABLES = {
    "level": "FLOTILLA_SANDBOX_LEVEL",
    "concurrency": "FLOTILLA_SANDBOX_CONCURRENCY",
    "sessions": "FLOTILLA_SANDBOX_SESSIONS",
    "python": "FLOTILLA_SANDBOX_PYTHON",
    "busy_part": "FLOTILLA_SANDBOX_BUSY_PART",
    "provider": "FLOTILLA_SANDBOX_PROVIDER",
    "url": "FLOTILLA_SANDBOX_URL",
    "namespace": "FLOTILLA_SANDBOX_NAMESPACE",
    "image": "FLOTILLA_SANDBOX_IMAGE",
    "warm": "FLOTILLA_SANDBOX_WARM",
    "box_network": "FLOTILLA_SANDBOX_BOX_NETWORK",
    "box_start_seconds": "FLOTILLA_SANDBOX_BOX_START_SECONDS",
    "box_lifetime_seconds": "FLOTILLA_SANDBOX_BOX_LIFETIME_SECONDS",
    "runtime": "FLOTILLA_SANDBOX_RUNTIME",
}
IMAGES = "FLOTILLA_SANDBOX_IMAGES"


class Waiting:
    """Little to follow: a sandbox serves every caller with the token, and reports for which experiment it is meant.

    Args:
        spare: receives that experiment.
        load: gives what is reported of its work.
    """

    def __init__(self, spare: SpareTime, load: Callable[[], Mapping[str, float]] = dict) -> None:
        self._spare = spare
        self._load = load
        self.notify: Callable[[], None] = lambda: None
        self._desired: DesiredState | None = None

    def observe(self) -> ObservedState:
        """Set the experiment that it serves; it never has anything to finish first."""
        desired = self._desired
        if desired is None or desired.assignment is None or desired.state is WorkState.IDLE:
            return ObservedState(load=self._load())
        state = WorkState.FINISHED if desired.state is WorkState.DRAINING else desired.state
        return ObservedState(experiment_id=desired.assignment.experiment_id, state=state, load=self._load())

    async def apply(self, desired: DesiredState) -> None:
        """Note the experiment."""
        self._desired = desired
        self._spare.own_experiment = desired.assignment.experiment_id if desired.assignment is not None else None
        self.notify()

    async def run(self) -> None:
        """Do nothing, for as long as the service lives."""
        await asyncio.Event().wait()


def sandbox_settings(token: str, environment: Mapping[str, str]) -> SandboxSettings:
    """Read ``FLOTILLA_SANDBOX_*`` and ``FLOTILLA_UNSAFE_SANDBOX``.

    Raises:
        InvalidRequest: a value is not allowed, or a file cannot be read; the detail names the variable.
    """
    values: dict[str, object] = {
        name: _value(name, environment[variable]) for name, variable in VARIABLES.items() if environment.get(variable)
    }
    if key := secret_from(environment, KEY):
        values["key"] = SecretStr(key)
    if patterns := [each.strip() for each in environment.get(IMAGES, "").split(",") if each.strip()]:
        values["images"] = patterns
    is_unsafe = environment.get("FLOTILLA_UNSAFE_SANDBOX", "").lower() in TRUE
    try:
        return SandboxSettings.model_validate({**values, "token": SecretStr(token), "unsafe_sandbox": is_unsafe})
    except ValidationError as error:
        item = error.errors()[0]
        if not item["loc"]:  # of several variables, which the message names
            raise InvalidRequest(item["msg"].removeprefix("Value error, ")) from None
        name = (VARIABLES | {"key": KEY, "images": IMAGES}).get(str(item["loc"][0]), "FLOTILLA_TOKEN")
        raise InvalidRequest(f"{name}: {item['msg']}") from None


def _value(name: str, text: str) -> object:
    """Read a variable as what the setting is; a text that is none of it stays one, and is refused as such."""
    kind = SandboxSettings.model_fields[name].annotation
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        return text


def create_member_app(given: Mapping[str, str], settings: ServiceSettings, address: str) -> FastAPI:
    """Make the app of a sandbox that registers with the fleet.

    Args:
        given: the environment of its start, with what is forgotten since.
        settings, address: of the service.
    """

    credentials = Credentials(settings.token)

    @contextlib.asynccontextmanager
    async def open_and_register(sandbox: SandboxSettings) -> AsyncIterator[SandboxState]:
        async with open_state(sandbox) as state, _member(settings, address, credentials, state):
            yield state

    return create_app(sandbox_settings(settings.token, given), open_and_register, credentials)


def main() -> int:
    """Serve; a refusal is one sentence and exit code 2."""
    # It runs untrusted programs: a secret that it does not know cannot be stolen from it.
    return run_service("sandbox", partial(create_member_app, dict(os.environ)), needs_redis=False)


@contextlib.asynccontextmanager
async def _member(
    settings: ServiceSettings, address: str, credentials: Credentials, state: SandboxState
) -> AsyncIterator[None]:
    registration = Registration(
        kind=ServiceKind.SANDBOX,
        address=address,
        host=socket.gethostname(),
        pid=os.getpid(),
        capabilities=await asyncio.to_thread(host_capabilities),
        incarnation=secrets.token_hex(8),
    )
    waiting = Waiting(state.spare, lambda: state.metrics.load() | state.pool.load())
    async with GatewayClient(settings.gateway_url, settings.token) as client:
        membership = Membership(
            client, registration, waiting.observe, waiting.apply, credentials=credentials, settings=settings
        )
        async with at_work(waiting, membership):
            yield


if __name__ == "__main__":
    sys.exit(main())
