"""Cores that nothing computes on although something waits for a stage beside them: pure, from spec and hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.service import ServiceKind

TRAINER_SETTING, ROLLOUT_SETTING = "parallelism.threads", "rollout.engine.threads"


@dataclass(frozen=True, slots=True)
class Placed:
    """A service of the experiment and the machine that it runs on."""

    kind: ServiceKind
    host: str
    cores: int


def advice_on_cores(component: str, spec: ExperimentSpec, services: Sequence[Placed]) -> str | None:
    """Name a host with cores that the stage which bounds the speed leaves idle, and the setting that would use them.

    With ``threads: auto`` a stage takes what is there; so only numbers in the spec leave cores idle.

    Args:
        component: what bounds the speed, as ``bottleneck`` names it.
        spec: of the experiment.
        services: that work for it.
    """
    threads = _threads(spec)
    settings = {ServiceKind.TRAINER: TRAINER_SETTING, ServiceKind.ROLLOUT: ROLLOUT_SETTING}
    wanted = {
        "trainer": (ServiceKind.TRAINER,),
        "generation": (ServiceKind.ROLLOUT,),
        "admission": (ServiceKind.TRAINER, ServiceKind.ROLLOUT),
    }.get(component, ())
    for host, cores in {service.host: service.cores for service in services}.items():
        here = [service.kind for service in services if service.host == host]
        busy = [threads[kind] for kind in here if kind in threads]
        # Where the stages take turns, only one of them computes at a time.
        used = max(busy, default=0) if component == "admission" else sum(busy)
        short = [settings[kind] for kind in wanted if kind in threads and kind in here]
        if short and used < cores:
            return f"{cores - used} of {cores} cores of {host} compute nothing: set {' and '.join(short)} to auto"
    return None


def _threads(spec: ExperimentSpec) -> Mapping[ServiceKind, int]:
    """Return how many threads each stage takes, where the spec has a number and they compute on cores at all."""
    found = {}
    engine, parallelism = spec.rollout.engine, spec.parallelism
    if parallelism.threads != "auto" and not parallelism.device.startswith("cuda"):
        found[ServiceKind.TRAINER] = parallelism.threads * (parallelism.ranks // parallelism.nodes)
    if isinstance(engine, TorchEngineConfig) and engine.threads != "auto" and not engine.device.startswith("cuda"):
        found[ServiceKind.ROLLOUT] = engine.threads
    return found
