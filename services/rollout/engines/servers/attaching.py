"""Whether a server that runs already is the one that the spec means, and what a start that failed says."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from flotilla.services.rollout.engines.servers.client import Refused
from flotilla.services.rollout.engines.servers.dialect import Caller, Dialect, ServedHere
from flotilla.services.rollout.engines.servers.model import ServedModel, read_served_model
from flotilla.services.rollout.engines.servers.settings import ServerSettings
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    ModelError,
    ServerUnreachable,
    Unavailable,
    WorkerDied,
)

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)
"""What reading the reply of some other program ends with."""


async def check_served(
    dialect: Dialect, caller: Caller, settings: ServerSettings, model: ServedModel, context_tokens: int
) -> None:
    """Check that a server is for this model, and has room for its context.

    Args:
        dialect: what kind of server it should be.
        caller: of the server.
        settings: of the engine, with the server's URL.
        model: what it should serve.
        context_tokens: prompt and completion together.

    Raises:
        ModelError: it is another server, is for another model, or was not started as the fleet needs it.
        Refused: it cannot answer now.
    """
    name, url, margin = dialect.name, settings.url, dialect.margin_tokens
    found = await _described(dialect, caller, settings)
    length, needed = found.context_tokens, context_tokens + margin
    if length is not None and length < needed:
        raise ModelError(
            f"the {name} server at {url} has a context of {length} tokens: start it with {found.context_flag} "
            f"{needed}, or lower rollout.engine.context_tokens to {length - margin}"
        )
    wanted = settings.model_path
    if (await asyncio.to_thread(_shapes_of, found.model_path)) not in (None, model.shapes):
        raise ModelError(f"the {name} server at {url} runs {found.model_path}, which is another model than {wanted}")


async def _described(dialect: Dialect, caller: Caller, settings: ServerSettings) -> ServedHere:
    name, url = dialect.name, settings.url
    try:
        return await dialect.describe(caller, settings)
    except Refused as error:
        if error.passes:
            raise
        raise ModelError(
            f"what answers at {url} is no {name} server that the fleet can use: {error.detail}; docs/engines.md tells "
            "how it has to be started"
        ) from error
    except UNREADABLE as error:
        raise ModelError(f"what answers at {url} is no {name} server: its description of itself is another") from error


def failed_start(error: BaseException, settings: ServerSettings, name: str, last_lines: str) -> FlotillaError | None:
    """Return the error that a failed start means to a retry; None to keep the error.

    Transient errors of an external server are retried without end. An own server that does not load
    is a death: started again and again, it would never end.

    Args:
        error: that the start ended with.
        settings: of the engine.
        name: of this kind of server.
        last_lines: that a Flotilla server wrote.
    """
    if settings.url is None:
        if isinstance(error, TimeoutError | DeadlineExceeded):
            return WorkerDied(
                f"the {name} server did not load {settings.model_path} within {settings.start_seconds:g} s "
                f"(rollout.engine.start_seconds); last lines: {last_lines}"
            )
        return WorkerDied(error.detail) if isinstance(error, Refused) else None
    where = f"the {name} server at {settings.url}"
    if isinstance(error, TimeoutError):
        return Unavailable(f"{where} was not ready within {settings.start_seconds:g} s (rollout.engine.start_seconds)")
    if isinstance(error, ServerUnreachable):
        return Unavailable(f"{where} cannot be reached now: start it, and this goes on by itself ({error.detail})")
    if isinstance(error, Refused):
        return Unavailable(f"{where} is not ready: {error.detail}") if error.passes else ModelError(error.detail)
    return None


def _shapes_of(directory: Path) -> Mapping[str, tuple[int, ...]] | None:
    """Read a model's shapes, if it can be read from here."""
    try:
        return read_served_model(directory).shapes
    except ModelError:
        return None
