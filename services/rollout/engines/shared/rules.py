"""Which experiments may have their samples in one engine's batch."""

from flotilla.shared.config.rules.publication import KEY, publishes_adapters
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec


def reason_not_shared(spec: ExperimentSpec) -> str | None:
    """Say why an experiment needs an engine of its own; None where it may share one.

    Args:
        spec: in which nothing is left to ``auto``.
    """
    engine = spec.rollout.engine
    if not isinstance(engine, TorchEngineConfig):
        return f"rollout.engine.kind {engine.kind} serves one experiment: torch alone is shared"
    if engine.recorded is not None:
        return "rollout.engine.recorded has no model"
    if spec.model.lora is None:
        return "it trains all weights: model.lora alone leaves a base that others can use"
    if not publishes_adapters(spec):
        return f"its versions are whole weights: {KEY} is {spec.asynchrony.publication.lora}"
    if engine.device != "cpu" or spec.model.dtype != "float32":
        return f"adapters of single samples are computed on a CPU in float32, not on {engine.device} in {_dtype(spec)}"
    if spec.exactness is not None:
        return f"exactness {spec.exactness} computes by another forward"
    if spec.shares_devices:
        return "resources.sharing time puts the engine to sleep"
    if spec.data.images is not None:
        return "data.images needs another forward"
    if spec.algorithm.router_replay == "R3":
        return "algorithm.router_replay R3 needs another forward"
    if spec.tracking.profiler.engine_versions:
        return "tracking.profiler.engine_versions records the whole engine"
    return None


def _dtype(spec: ExperimentSpec) -> str:
    return str(spec.model.dtype)
