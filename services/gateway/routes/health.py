"""Whether the gateway lives and can work, and its gauges for Prometheus. Open to everybody on the network it serves."""

from collections import Counter
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from services.gateway.experiments.book import Experiment
from services.gateway.routes.access import Gateway
from services.gateway.state import GatewayState
from shared.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(gateway: Gateway) -> dict[str, str]:
    """Say that database and data plane answer.

    Raises:
        Unavailable: one of them does not; the detail says which (503).
    """
    reason = await gateway.why_not_ready()
    if reason is not None:
        raise Unavailable(reason)
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(gateway: Gateway) -> str:
    """Give the gauges in Prometheus' text format."""
    return "".join(f"{line}\n" for line in lines_of(gateway))


def lines_of(gateway: GatewayState) -> list[str]:
    """List the gauges; a name is declared once, before its samples."""
    lines = ["# TYPE flotilla_services gauge"]
    kinds = Counter(service.kind.value for service in gateway.registry)
    lines += [f'flotilla_services{{kind="{kind}"}} {count}' for kind, count in sorted(kinds.items())]
    lines.append("# TYPE flotilla_experiments gauge")
    states = Counter(experiment.state.value for experiment in gateway.book)
    lines += [f'flotilla_experiments{{state="{state}"}} {count}' for state, count in sorted(states.items())]
    active = [experiment for experiment in gateway.book if experiment.is_active]
    gauges: dict[str, Callable[[Experiment], int | None]] = {
        "step": lambda e: e.record.step,
        "policy_version": lambda e: e.record.policy_version,
        "outstanding_groups": lambda e: e.ledger.outstanding if e.ledger else None,
        "issued_groups": lambda e: e.ledger.issued if e.ledger else None,
        "trained_groups": lambda e: e.ledger.trained if e.ledger else None,
        "has_problem": lambda e: int(e.record.problem is not None),
    }
    for name, read in gauges.items():
        lines.append(f"# TYPE flotilla_experiment_{name} gauge")
        for experiment in active:
            value = read(experiment)
            if value is not None:
                lines.append(f'flotilla_experiment_{name}{{experiment="{experiment.id}"}} {value}')
    return lines
