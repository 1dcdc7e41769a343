"""Tokens: the operator's, those that were made, and passes.

Of a token that was made only its digest is kept. All of them are in memory, so a request costs no query.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from flotilla.services.gateway.access.caller import GATEWAY, actor
from flotilla.services.gateway.access.quotas import UNLIMITED
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import AuditRecord, TokenRecord
from flotilla.services.gateway.store.writes import AppendAudit, DeleteRecord, PutRecord
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Conflict, NotFound
from flotilla.shared.net.authorisation.access import PassKey, Principal, Scope
from flotilla.shared.net.authorisation.token_records import Quota, TokenRequest
from flotilla.shared.net.authorisation.tokens import digest_of, is_same_secret, new_token
from flotilla.shared.schemas.service import ServiceKind

PASS_SECONDS = 3600.0
"""Life of a service's pass. Each answer in its second half brings the next one."""
MOST_PASSES = 4096
OPERATOR = Principal(Scope.OPERATOR, "operator")
MADE_PREFIX = "flt_"
CALLS: Mapping[ServiceKind, tuple[ServiceKind, ...]] = {
    ServiceKind.ROLLOUT: (ServiceKind.TRAINER, ServiceKind.SANDBOX),
    ServiceKind.REWARD: (ServiceKind.SANDBOX,),
    ServiceKind.TRAINER: (),
    ServiceKind.SANDBOX: (),
}
"""Which services call which: rollouts pull weights and open sessions, rewards run programs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a token says.

    Attributes:
        principal: its identity.
        expires_at: seconds since the epoch; None if it does not expire.
        renewed: the pass that takes its place, if it is time.
        digest: of a token that was made under a name, which later ones may have; of others empty.
    """

    principal: Principal
    expires_at: float | None = None
    renewed: str | None = None
    digest: str = ""


class Tokens:
    """Knows every token of the fleet.

    Args:
        operator_token: of the settings.
        service_token: with which services register; None if there is none.
        quota: of tokens that have none of their own.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        operator_token: str,
        service_token: str | None = None,
        quota: Quota = UNLIMITED,
    ) -> None:
        self._store = store
        self._clock = clock
        self._operator = operator_token
        self._service = service_token
        self._quota = quota
        self._key = PassKey(operator_token)
        self._made: dict[str, TokenRecord] = {}
        self._known_passes: dict[str, tuple[Principal, float | None]] = {}
        """Whose signature was right, by digest: every service shows its own in each of its calls."""

    async def load(self) -> None:
        """Load those that were made for an earlier process."""
        self._made = {record.digest: record for record in await self._store.tokens()}

    def read(self, token: str | None) -> Shown | None:
        """Return a token's identity; None if it is unknown, revoked or expired."""
        shown = self._find(token)
        is_over = shown is not None and shown.expires_at is not None and shown.expires_at <= self._clock.now()
        return None if is_over else shown

    def is_ours(self, token: str | None) -> bool:
        """Return whether a token is of this fleet, though it may have expired."""
        return self._find(token) is not None

    def _find(self, token: str | None) -> Shown | None:
        if token is None or not token.isascii():
            return None
        if is_same_secret(token, self._operator):
            return Shown(OPERATOR)
        if self._service is not None and is_same_secret(token, self._service):
            return Shown(Principal(Scope.SERVICE, "a service"))
        return self._read_pass(token) or self._read_made(token)

    def _read_pass(self, token: str) -> Shown | None:
        name = digest_of(token)
        found = self._known_passes.get(name) or self._key.read(token)
        if found is None:
            return None
        if name not in self._known_passes:
            if len(self._known_passes) >= MOST_PASSES:
                self._known_passes.clear()
            self._known_passes[name] = found
        principal, expires_at = found
        if principal.service_id is None or principal.kind is None or expires_at is None:
            return Shown(principal, expires_at)
        left = expires_at - self._clock.now()
        is_due = left < PASS_SECONDS / 2
        return Shown(principal, expires_at, self.pass_of(principal.kind, principal.service_id) if is_due else None)

    def _read_made(self, token: str) -> Shown | None:
        # By the digest: the time of the lookup reveals nothing about a token that hashes to it.
        record = self._made.get(digest_of(token))
        if record is None:
            return None
        kind = None if record.kind is None else ServiceKind(record.kind)
        scope, experiment_id = Scope(record.scope), record.experiment_id
        principal = Principal(
            scope, record.name, kind, experiment_id=experiment_id, subject=record.subject, owner=record.owner
        )
        return Shown(principal, record.expires_at, digest=record.digest)

    def pass_of(self, kind: ServiceKind, service_id: str) -> str:
        """Make the pass of a registered service."""
        return self.issue(Principal(Scope.SERVICE, service_id, kind, service_id), PASS_SECONDS)

    def assignment_of(self, service_id: str, experiment_id: str, epoch: int) -> str:
        """Make what a trainer shows while it is assigned to an experiment: it ends with the epoch, and no sooner."""
        who = Principal(Scope.SERVICE, service_id, ServiceKind.TRAINER, service_id, experiment_id, epoch=epoch)
        return self._key.sign(who, None)

    def agent_of(self, experiment_id: str) -> str:
        """Make what the agents show that rollouts start for an experiment: for its episodes, while it has any."""
        return self._key.sign(Principal(Scope.AGENT, "environment", experiment_id=experiment_id), None)

    def issue(self, principal: Principal, seconds: float) -> str:
        """Make a pass, such as for one episode. It is not stored, and cannot be revoked before it expires."""
        return self._key.sign(principal, self._clock.now() + seconds)

    def peers_of(self, kind: ServiceKind) -> dict[ServiceKind, str]:
        """What a service of a kind shows to those that it calls."""
        shown = {peer: self._key.peer_token(peer) for peer in CALLS[kind]}
        if kind is ServiceKind.ROLLOUT:
            shown[kind] = self._key.weights_token()
        return shown

    def peer_of(self, kind: ServiceKind) -> str:
        """What the gateway shows to services of a kind where it calls one."""
        return self._key.peer_token(kind)

    def accepted_by(self, kind: ServiceKind) -> tuple[str, ...]:
        """Digests of the tokens that a service of a kind lets in: its callers' and the operator's."""
        return digest_of(self._key.peer_token(kind)), digest_of(self._operator)

    def accepted_for_weights(self, kind: ServiceKind) -> tuple[str, ...]:
        """Digests of the tokens that a service of a kind lets in to read weights, and to nothing else."""
        return (digest_of(self._key.weights_token()),) if kind is ServiceKind.ROLLOUT else ()

    def for_logs(self, service_id: str) -> str:
        """What the gateway shows to a service to read what it logged; no other service lets it in."""
        return self._key.logs_token(service_id)

    def accepted_for_logs(self, service_id: str) -> tuple[str, ...]:
        """Digests of the tokens that a service lets in to read what it logged: the gateway's and the operator's."""
        return digest_of(self._key.logs_token(service_id)), digest_of(self._operator)

    async def create(self, request: TokenRequest) -> tuple[TokenRecord, str]:
        """Make a token; this is the only time that it is seen.

        Raises:
            Conflict: there is one of this name.
        """
        token = MADE_PREFIX + new_token()
        now = self._clock.now()
        async with self._store.transaction() as change:
            if any(record.name == request.name for record in self._made.values()):
                raise Conflict(f"there is a token named {request.name!r}: revoke it first, or choose another name")
            record = TokenRecord(
                id=secrets.token_hex(4),
                name=request.name,
                scope=request.scope.value,
                kind=None if request.kind is None else request.kind.value,
                experiment_id=request.experiment_id,
                subject=request.subject,
                digest=digest_of(token),
                created_at=now,
                expires_at=None if request.expires_in_seconds is None else now + request.expires_in_seconds,
                created_by=actor(),
                quota=None if request.quota is None else request.quota.model_dump(mode="json"),
                owner=request.owner,
            )
            facts: dict[str, object] = {"name": record.name, "scope": record.scope, "expires_at": record.expires_at}
            if record.owner is not None:
                facts["owner"] = record.owner
            change.write(PutRecord(record), self._audit(record, "create", facts))
            change.then(lambda: self._made.__setitem__(record.digest, record))
        return record, token

    async def revoke(self, reference: str) -> TokenRecord:
        """Delete one by id or name: from the next request on it is unknown.

        Raises:
            NotFound: there is none.
        """
        async with self._store.transaction() as change:
            record = next((each for each in self._made.values() if reference in {each.id, each.name}), None)
            if record is None:
                raise NotFound(f"there is no token {reference!r}")
            change.write(DeleteRecord(TokenRecord, record.id), self._audit(record, "revoke", {"name": record.name}))
            change.then(lambda: self._made.pop(record.digest, None))
        return record

    def quota_of(self, whose: str | None) -> Quota:
        """Find what a token may have, by its name in audit records; None: whichever process made it is not known."""
        if whose is None or whose == GATEWAY:
            return UNLIMITED
        for record in self._made.values():
            if record.quota is not None and Principal(Scope(record.scope), record.name).actor == whose:
                return Quota.model_validate(record.quota)
        return self._quota

    async def delete_expired(self) -> None:
        """Forget those that have expired."""
        async with self._store.transaction() as change:
            for record in list(self._made.values()):
                if record.expires_at is not None and record.expires_at <= self._clock.now():
                    change.write(
                        DeleteRecord(TokenRecord, record.id), self._audit(record, "expire", {"name": record.name})
                    )
                    change.then(partial(self._made.pop, record.digest, None))

    def all(self) -> list[TokenRecord]:
        """List those that were made and not revoked, oldest first."""
        return sorted(self._made.values(), key=lambda record: (record.created_at, record.id))

    def _audit(self, record: TokenRecord, action: str, facts: Mapping[str, object]) -> AppendAudit:
        return AppendAudit(AuditRecord(self._clock.now(), action, f"tokens/{record.id}", facts, actor()))
