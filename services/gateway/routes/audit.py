"""Who changed what of an experiment."""

from fastapi import APIRouter

from flotilla.services.gateway.routes.dependencies import Gateway, Limit
from flotilla.shared.clock import rfc3339
from flotilla.shared.schemas.experiment import AuditEntry, Page

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/audit")
async def audit(experiment_id: str, gateway: Gateway, limit: Limit = 100) -> Page[AuditEntry]:
    """List the newest mutations of an experiment, newest first; also of one that was deleted."""
    records = await gateway.store.audit(f"experiments/{experiment_id}", limit=limit)
    items = tuple(AuditEntry(at=rfc3339(r.at), action=r.action, actor=r.actor, detail=dict(r.detail)) for r in records)
    return Page(items=items)
