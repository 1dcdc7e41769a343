"""Tokens that an operator makes, lists and revokes."""

from typing import Self

from pydantic import Field, model_validator

from flotilla.shared.net.authorisation.access import Scope
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.wire import Wire

DEFAULT_SECONDS = 90 * 86_400.0
MAX_SECONDS = 3650 * 86_400.0
OWNER = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
OWNED_SCOPES = frozenset({Scope.OPERATOR, Scope.READER})
"""Of a token with an owner."""
BOUND_SCOPES = frozenset({Scope.AGENT, Scope.GRADER})
"""Of one experiment each."""


class Quota(Wire):
    """What one token may have at a time; null: as much as there is."""

    experiments: int | None = Field(1000, ge=0)
    """Experiments that it made and that were not deleted."""
    running: int | None = Field(100, ge=0)
    """Of those, how many may be starting, running or paused."""
    sample_bytes: int | None = Field(None, ge=0)
    """Sum of their ``samples.max_bytes``: what their samples may take."""
    episodes: int | None = Field(10_000, ge=0)
    """Episodes that it began (an agent) and that are open."""


class TokenRequest(Wire):
    """What a token is to be for."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=48)
    """In audit records, and to revoke it by."""
    scope: Scope
    kind: ServiceKind | None = None
    """Of service, for the scope service; null: any."""
    experiment_id: str | None = Field(None, max_length=96, pattern=r"^[A-Za-z0-9._-]+$")
    """The only experiment that it may touch; agents and graders need one, readers may have one."""
    subject: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")
    """What else an agent's or grader's token is bound to, such as one episode."""
    expires_in_seconds: float | None = Field(DEFAULT_SECONDS, gt=0, le=MAX_SECONDS)
    """Null: it does not expire."""
    quota: Quota | None = None
    """What it may have; null: what the gateway's settings say. Operators and agents have something to count. Of a token
    with an owner all that the owner has counts."""
    owner: str | None = Field(None, max_length=48, pattern=OWNER)
    """Whose it is: it sees and changes only experiments of this owner, and makes only such. Null: the fleet's own."""

    @model_validator(mode="after")
    def _fits_its_scope(self) -> Self:
        if self.kind is not None and self.scope is not Scope.SERVICE:
            raise ValueError(f"kind has no effect with the scope {self.scope}: drop it, or use the scope service")
        if self.scope in BOUND_SCOPES and self.experiment_id is None:
            raise ValueError(f"the scope {self.scope} is for one experiment: give experiment_id")
        if self.experiment_id is not None and self.scope in {Scope.OPERATOR, Scope.SERVICE}:
            raise ValueError(f"experiment_id has no effect with the scope {self.scope}: drop it")
        if self.quota is not None and self.scope not in {Scope.OPERATOR, Scope.AGENT}:
            raise ValueError(f"quota has no effect with the scope {self.scope}: drop it")
        if self.owner is not None and self.scope not in OWNED_SCOPES:
            raise ValueError(f"owner has no effect with the scope {self.scope}: drop it, or use operator or reader")
        if self.subject is not None and self.scope not in BOUND_SCOPES:
            raise ValueError(f"subject has no effect with the scope {self.scope}: drop it")
        return self


class TokenView(Wire):
    """A token, without what it is made of."""

    id: str
    name: str
    scope: Scope
    kind: ServiceKind | None = None
    experiment_id: str | None = None
    subject: str | None = None
    created_at: str
    created_by: str
    expires_at: str | None = None
    is_expired: bool = False
    quota: Quota | None = None
    """What it may have; null: what the gateway's settings say."""
    owner: str | None = None
    """Whose it is; null: the fleet's own."""


class NewToken(TokenView):
    """A token that was just made."""

    token: str
    """Shown this once: the gateway keeps no more than its digest."""


class CallerView(Wire):
    """The identity of a request's token."""

    name: str
    scope: Scope
    kind: ServiceKind | None = None
    service_id: str | None = None
    experiment_id: str | None = None
    subject: str | None = None
    expires_at: str | None = None
    owner: str | None = None
