"""What bounds the speed of an experiment."""

from fastapi import APIRouter

from flotilla.services.gateway.lifecycle.rules import views_of
from flotilla.services.gateway.monitoring.bottleneck import Placed, advice_on_cores
from flotilla.services.gateway.routes.dependencies import Gateway
from flotilla.shared.schemas.experiment import DiagnosisView, ExperimentState, FailingService, Problem
from flotilla.shared.schemas.health import HealthFinding

router = APIRouter(prefix="/experiments/{experiment_id}", tags=["series"])


@router.get("/diagnosis")
async def diagnosis(experiment_id: str, gateway: Gateway) -> DiagnosisView:
    """Name what bounds the experiment's speed now, with its evidence and what would change it.

    Raises:
        NotFound: there is no such experiment.
    """
    experiment = gateway.repository.get(experiment_id)
    now = gateway.clock.monotonic()
    measured = gateway.measurements.of(experiment)
    found = measured.bottleneck(now, experiment.spec)
    problem = experiment.record.problem
    is_over = experiment.state is not ExperimentState.RUNNING
    members = [Placed(s.kind, s.record.host, s.capabilities.cores) for s in gateway.registry.of(experiment.id)]
    idle = advice_on_cores(found.component, experiment.spec, members)
    return DiagnosisView(
        component="none" if is_over else found.component,
        cause=f"the experiment is {experiment.state.value}" if is_over else found.cause,
        advice="" if is_over else "; ".join(filter(None, (idle, found.advice))),
        window_seconds=round(measured.window.seconds(now), 3),
        evidence=found.evidence,
        problem=Problem(**problem) if problem is not None else None,
        failing=tuple(
            FailingService(service_id=s.id, component=failure.component, cause=failure.cause)
            for s in gateway.registry.of(experiment.id)
            if (failure := s.observed.failure) is not None
        ),
        rules=await views_of(gateway.store, experiment, measured.rule_points),
        health=tuple(HealthFinding.model_validate(each) for each in experiment.record.health or ()),
    )
