"""Which gateway a command or a client talks to: the one that is named, else the fleet of the data directory."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from flotilla.defaults import DEFAULT_DATA as DEFAULT_DATA
from flotilla.shared.children.processes import birth_of
from flotilla.shared.config.load.spec_text import merged
from flotilla.shared.environment.settings import check_gateway_url, token_from
from flotilla.shared.errors import Conflict, NotFound, Unauthorized, Unavailable
from flotilla.shared.locations.allowed import AGENT, grant_code
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import ExperimentKind, ExperimentState, ExperimentView

FLEET_FILE = "fleet.json"
RUNS = Path("runs")
"""Where ``flotilla run`` keeps its runs, below the present directory."""
Client = TypeVar("Client", bound=GatewayClient)
View = TypeVar("View", bound=ExperimentView)


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """Where a running fleet is found.

    Attributes:
        pid, birth: the process that owns it, and its start time, which distinguishes it from a later one with its pid.
        gateway_url, redis_url: its servers.
        token: the operator's.
        data: its directory.
    """

    pid: int
    gateway_url: str
    token: str
    data: Path
    redis_url: str
    birth: str | None = None

    @classmethod
    def read(cls, data: Path) -> "FleetInfo":
        """Find the fleet of a data directory.

        Raises:
            Unavailable: none runs there.
        """
        try:
            content = json.loads((data / FLEET_FILE).read_text(encoding="utf-8"))
            place = content["gateway_url"], content["token"], data, content["redis_url"]
            info = cls(int(content["pid"]), *place, content.get("birth"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            start = f"no fleet runs with the data directory {data}: start one with `{typed('up', data)}`"
            raise Unavailable(start + _of_earlier_run(data)) from None
        if not info.is_running:
            raise Unavailable(f"the fleet of {data} (pid {info.pid}) has ended: start one with `{typed('up', data)}`")
        return info

    @property
    def is_running(self) -> bool:
        """Whether the process that owns the fleet lives: after a crash another one may have its id."""
        now = birth_of(self.pid)
        return now is not None and self.birth in {None, now}


def _of_earlier_run(data: Path) -> str:
    """Return how to reach the newest run of ``flotilla run``, whose fleet ended with it."""
    if str(data) != DEFAULT_DATA or not (runs := sorted(RUNS.glob("*/fleet"), key=lambda path: path.stat().st_mtime)):
        return ""
    return f"; the experiments of {runs[-1].parent} are in `{typed('up', runs[-1])}`"


def typed(command: str, data: Path) -> str:
    """Write a command for the fleet of a data directory as it is typed."""
    return f"flotilla {command}" if str(data) == DEFAULT_DATA else f"flotilla {command} --data {shlex.quote(str(data))}"


def open_client(
    url: str | None, data: Path, *, token: str | None = None, environment: Mapping[str, str] = os.environ
) -> GatewayClient:
    """Make a client of a gateway; nothing is called yet.

    Args:
        url: the gateway's; None: ``FLOTILLA_GATEWAY_URL``, else the fleet of ``data``.
        data: data directory of a local fleet.
        token: for a gateway with a URL; None: ``FLOTILLA_TOKEN``, else the content of ``FLOTILLA_TOKEN_FILE``.
        environment: where the variables are read.

    Raises:
        Unavailable: no gateway is named and no fleet runs.
        InvalidRequest: the URL is none, or what should be a token is none.
        Unauthorized: a gateway is named, but no token.
    """
    return open_client_of(GatewayClient, url, data, token=token, environment=environment)


def open_client_of(
    kind: type[Client],
    url: str | None,
    data: Path,
    *,
    token: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Client:
    """Make a client of a kind, as ``open_client`` does."""
    url = url or environment.get("FLOTILLA_GATEWAY_URL")
    if not url:
        info = FleetInfo.read(data)
        return kind(info.gateway_url, token or info.token)
    check_gateway_url(url)
    token = token or token_from(environment)
    if not token:
        raise Unauthorized(
            f"{url} wants the fleet's token: set FLOTILLA_TOKEN, or FLOTILLA_TOKEN_FILE to a file that holds it"
        )
    return kind(url, token)


def allow_code(url: str | None, data: Path, document: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Let the fleet of ``data`` run the code that a spec names; one that has a URL decides by its own settings.

    Args:
        url: the gateway's, as for ``open_client``.
        data: data directory of a local fleet.
        document: the spec, or changes of one.
        environment: where the variables are read.
    """
    if not (url or environment.get("FLOTILLA_GATEWAY_URL")):
        grant_code(data, document)


def allow_fork(
    url: str | None, data: Path, spec: Any, changes: Any, environment: Mapping[str, str] = os.environ
) -> None:
    """Let the fleet of ``data`` start the environment of agents that a fork has, as ``allow_code``.

    It is allowed as a whole, also where the changes are of a part of it: what else a spec names is in them.
    """
    own, *above = reversed(AGENT.split("."))
    for name in reversed(above):
        spec, changes = (each.get(name) if isinstance(each, Mapping) else None for each in (spec, changes))
    if not isinstance(changes, Mapping) or own not in changes:
        return
    document = {own: merged((spec or {}).get(own), changes[own])}
    for name in above:
        document = {name: document}
    allow_code(url, data, document, environment)


def choose_experiment(views: Sequence[View], reference: str | None, *, is_unique: bool = False) -> View:
    """Choose an experiment by id, name or the beginning of an id.

    A name means the experiment of that name that is active, else the newest of them; without a reference all count.

    Args:
        views: all experiments, oldest first.
        reference: what was typed.
        is_unique: a name that several have is not enough, as for what cannot be undone.

    Raises:
        NotFound: there is none; the detail names what is near.
        Conflict: several are meant; the detail lists them.
    """
    if reference is None:
        # What a client of the Tinker API drives is named where it is meant.
        found = _active_else_newest([view for view in views if view.kind is ExperimentKind.SPEC])
    else:
        found = [view for view in views if view.id == reference]
        named = [view for view in views if view.name == reference]
        found = found or (named if is_unique else _active_else_newest(named))
        found = found or [view for view in views if reference and view.id.startswith(reference)]
    if not found:
        raise NotFound(_not_found(views, reference))
    if len(found) > 1:
        candidates = ", ".join(f"{view.id} ({view.state})" for view in found)
        raise Conflict(f"several experiments match, choose an id: {candidates}")
    return found[0]


def _active_else_newest(views: Sequence[View]) -> list[View]:
    return [view for view in views if is_active(view)] or list(views[-1:])


def is_active(view: ExperimentView) -> bool:
    """Whether something is done for it, or it is paused."""
    return not view.state.is_final and view.state is not ExperimentState.DRAFT


def _not_found(views: Sequence[ExperimentView], reference: str | None) -> str:
    if reference is None or not views:
        return "there is no experiment; `flotilla start FILE` makes one"
    near = get_close_matches(reference, {view.name for view in views} | {view.id for view in views}, n=3)
    hint = f": did you mean {' or '.join(near)}?" if near else "; `flotilla ls` lists them"
    return f"there is no experiment {reference!r}{hint}"
