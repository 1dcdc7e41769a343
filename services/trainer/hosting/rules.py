"""Which experiments may train in one process, on one base."""

from flotilla.shared.config.rules.publication import KEY, publishes_adapters
from flotilla.shared.config.spec import ExperimentSpec


def reason_not_shared(spec: ExperimentSpec) -> str | None:
    """Say why an experiment trains in a process of its own; None where it may share one.

    Args:
        spec: in which nothing is left to ``auto``.
    """
    if spec.model.lora is None:
        return "it trains all weights: model.lora alone leaves a base that others can use"
    if not publishes_adapters(spec):
        return f"its images are whole weights: {KEY} is {spec.asynchrony.publication.lora}"
    if spec.parallelism.ranks > 1:
        return f"it has {spec.parallelism.ranks} ranks"
    if spec.parallelism.device != "cpu":
        return f"bases are shared on a CPU, not on {spec.parallelism.device}"
    if spec.model.quantisation is not None:
        return "model.lora.quantisation makes another base"
    if spec.algorithm.needs_critic:
        return "its critic is a whole model of its own"
    if spec.exactness is not None:
        return f"exactness {spec.exactness} computes in another way"
    if spec.optimisation.compile_layers:
        return "optimisation.compile_layers makes programs of its own layers"
    if spec.shares_devices:
        return "resources.sharing time moves the base away"
    return None
