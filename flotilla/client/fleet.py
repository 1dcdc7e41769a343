"""Calls about a fleet itself: its services, their assignment to experiments, and tokens; also asynchronous."""

from collections.abc import Sequence
from urllib.parse import quote

from flotilla.client.blocking import BlockingCalls, waiting
from flotilla.client.calls import PAGE, Calls
from flotilla.shared.errors import NotFound
from flotilla.shared.net.authorisation.access import Scope
from flotilla.shared.net.authorisation.token_records import DEFAULT_SECONDS, NewToken, Quota, TokenView
from flotilla.shared.schemas.checks import FleetExamination
from flotilla.shared.schemas.costs import Usage
from flotilla.shared.schemas.experiment import Event, FleetView, Page
from flotilla.shared.schemas.retention import PruneRequest, Pruning, Retention
from flotilla.shared.schemas.service import ServiceKind, ServiceView
from flotilla.shared.schemas.tinker import TinkerLedger, TinkerLedgers, TinkerSequence

EXAMINATION_SECONDS = 90.0
"""More than an examination takes on a busy host."""
PRUNING_SECONDS = 600.0
"""For the sizes of all files, and to delete some."""


class FleetCalls(Calls):
    """What an operator asks of a fleet."""

    async def check_ready(self) -> None:
        """Return where the gateway takes calls.

        Raises:
            Unavailable: it does not yet.
        """
        await self._answer("GET", "/readyz")

    async def services(self) -> list[ServiceView]:
        """List the registered services."""
        return await self._pages(ServiceView, "/v1/services")

    async def service(self, service_id: str) -> ServiceView:
        """Read one service.

        Raises:
            NotFound: it is not registered, or has left.
        """
        return await self._call(ServiceView, "GET", f"/v1/services/{quote(service_id, safe='')}")

    async def drain(self, service_id: str, notice_seconds: float | None = None) -> ServiceView:
        """Let a service finish or hand over its work and leave, within a notice; None: the usual one."""
        body = {} if notice_seconds is None else {"notice_seconds": notice_seconds}
        return await self._call(ServiceView, "POST", f"/v1/services/{quote(service_id, safe='')}/drain", body=body)

    async def fleet(self) -> FleetView:
        """Read which experiment has what share of the services, and what it waits for."""
        return await self._call(FleetView, "GET", "/v1/fleet")

    async def usage(self, experiment_id: str) -> Usage:
        """Add up what an experiment took of each pool of machines, and the tokens that came of it; by its whole id.

        Raises:
            NotFound: there is no such experiment.
        """
        return await self._call(Usage, "GET", f"/v1/experiments/{quote(experiment_id, safe='')}/usage")

    async def log_page(self, experiment_id: str, *, types: Sequence[str] = (), after: int = 0) -> Page[Event]:
        """Read the next events of an experiment as they were stored, of some types or of all; by its whole id.

        Args:
            experiment_id: whose.
            types: such as ``evaluation``.
            after: id of the last event that is known. A page that is not full is the last one so far.

        Raises:
            NotFound: there is no such experiment.
        """
        params = {"types": ",".join(types) or None, "after": after or None, "limit": PAGE}
        path = f"/v1/experiments/{quote(experiment_id, safe='')}/log"
        return await self._call(Page[Event], "GET", path, params=params)

    async def examine(self) -> FleetExamination:
        """Let services of every host try to reach each other, Redis and the shared folder; takes half a minute at most.

        Raises:
            Conflict: the fleet is being examined already.
        """
        answer = await self._gateway.call(
            "POST",
            "/v1/fleet/checks",
            deadline_seconds=max(self._deadline_seconds, EXAMINATION_SECONDS),
            attempt_seconds=EXAMINATION_SECONDS,
        )
        return FleetExamination.model_validate(answer)

    async def prune(self, retention: Retention | None = None, *, dry_run: bool = True) -> Pruning:
        """Delete expired data of finished experiments, or only list it.

        Args:
            retention: how long what is kept; None: as the gateway's settings say.
            dry_run: delete nothing.

        Raises:
            InvalidRequest: no retention time is set.
            Conflict: that is being done already.
        """
        body = PruneRequest(**(retention or Retention()).model_dump(), dry_run=dry_run)
        answer = await self._gateway.call(
            "POST",
            "/v1/fleet/prunings",
            body=body,
            deadline_seconds=max(self._deadline_seconds, PRUNING_SECONDS),
            attempt_seconds=PRUNING_SECONDS,
        )
        return Pruning.model_validate(answer)

    async def tinker_ledgers(self) -> list[TinkerLedger]:
        """Count what became of the requests to the Tinker API, of each token; empty where it is not served."""
        try:
            return list((await self._call(TinkerLedgers, "GET", "/api/v1/ledger")).owners)
        except NotFound:
            return []

    async def tinker_sequence(self, sequence_id: str) -> TinkerSequence:
        """Return which weights sampled each token of a sequence of the Tinker API, within a day.

        Raises:
            NotFound: this token asked for no such sequence, or it is no longer known.
        """
        return await self._call(TinkerSequence, "GET", f"/api/v1/sequences/{quote(sequence_id, safe='')}")

    async def tokens(self) -> list[TokenView]:
        """List the tokens that were made and not revoked."""
        return await self._pages(TokenView, "/v1/tokens")

    async def create_token(
        self,
        name: str,
        scope: Scope | str,
        *,
        kind: ServiceKind | str | None = None,
        experiment_id: str | None = None,
        subject: str | None = None,
        expires_in_seconds: float | None = DEFAULT_SECONDS,
        quota: Quota | None = None,
        owner: str | None = None,
    ) -> NewToken:
        """Make a token, which is shown this once; for what each part is, see ``TokenRequest``."""
        body: dict[str, object] = {
            "name": name,
            "scope": scope,
            "kind": kind,
            "experiment_id": experiment_id,
            "subject": subject,
            "expires_in_seconds": expires_in_seconds,
            "quota": None if quota is None else quota.model_dump(mode="json"),
        }
        if owner is not None:
            body["owner"] = owner
        return await self._call(NewToken, "POST", "/v1/tokens", body=body)

    async def revoke_token(self, token: str) -> None:
        """Revoke a token by its id or name: its next request is refused."""
        await self._answer("DELETE", f"/v1/tokens/{quote(token, safe='')}")


class BlockingFleetCalls(BlockingCalls):
    """The same without ``await``."""

    check_ready = waiting(FleetCalls.check_ready)
    services = waiting(FleetCalls.services)
    service = waiting(FleetCalls.service)
    drain = waiting(FleetCalls.drain)
    fleet = waiting(FleetCalls.fleet)
    usage = waiting(FleetCalls.usage)
    log_page = waiting(FleetCalls.log_page)
    examine = waiting(FleetCalls.examine)
    prune = waiting(FleetCalls.prune)
    tinker_ledgers = waiting(FleetCalls.tinker_ledgers)
    tinker_sequence = waiting(FleetCalls.tinker_sequence)
    tokens = waiting(FleetCalls.tokens)
    create_token = waiting(FleetCalls.create_token)
    revoke_token = waiting(FleetCalls.revoke_token)
