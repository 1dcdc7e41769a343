"""Tokens: made, listed and revoked by operators."""

from fastapi import APIRouter, Request

from flotilla.services.gateway.access.tokens import Shown
from flotilla.services.gateway.routes.dependencies import Cursor, Gateway, Limit, page_of
from flotilla.services.gateway.store.records import TokenRecord
from flotilla.shared.clock import rfc3339
from flotilla.shared.net.authorisation.token_records import CallerView, NewToken, TokenRequest, TokenView
from flotilla.shared.schemas.experiment import Page

router = APIRouter(prefix="/tokens", tags=["tokens"])


@router.post("", status_code=201)
async def create(request: TokenRequest, gateway: Gateway) -> NewToken:
    """Make a token. The answer holds it, and nothing else ever does; with an idempotency key it is not kept either.

    Raises:
        Conflict: there is one of this name.
    """
    record, token = await gateway.tokens.create(request)
    return NewToken(**_facts(record, gateway.clock.now()), token=token)


@router.get("")
async def index(gateway: Gateway, after: Cursor = None, limit: Limit = 100) -> Page[TokenView]:
    """List those that were made and not revoked, oldest first; the operator's own and passes are not among them."""
    now = gateway.clock.now()
    return page_of([(each.id, TokenView(**_facts(each, now))) for each in gateway.tokens.all()], after, limit)


@router.get("/self")
async def show_self(request: Request) -> CallerView:
    """Return the identity of this request's token."""
    shown: Shown = request.state.shown
    who = shown.principal
    return CallerView(
        name=who.name,
        scope=who.scope,
        kind=who.kind,
        service_id=who.service_id,
        experiment_id=who.experiment_id,
        subject=who.subject,
        owner=who.owner,
        expires_at=None if shown.expires_at is None else rfc3339(shown.expires_at),
    )


@router.delete("/{token_id}", status_code=204)
async def revoke(token_id: str, gateway: Gateway) -> None:
    """Revoke a token by its id or name: from the next request on it is unknown.

    Raises:
        NotFound: there is none.
    """
    await gateway.tokens.revoke(token_id)


def _facts(record: TokenRecord, now: float) -> dict[str, object]:
    expires_at = record.expires_at
    return {
        "id": record.id,
        "name": record.name,
        "scope": record.scope,
        "kind": record.kind,
        "experiment_id": record.experiment_id,
        "subject": record.subject,
        "created_at": rfc3339(record.created_at),
        "created_by": record.created_by,
        "expires_at": None if expires_at is None else rfc3339(expires_at),
        "quota": record.quota,
        "owner": record.owner,
        "is_expired": expires_at is not None and expires_at <= now,
    }
