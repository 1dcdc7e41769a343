"""The engines' processes that the services of one rollout process share: one for each base, and its settings.

Not every experiment may have its samples in a batch with those of others.
"""

import asyncio
import logging
from collections.abc import Callable

from flotilla.services.rollout.engines.own import embedded_settings
from flotilla.services.rollout.engines.process.engine import ProcessEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.shared.engine import Adapting, Base, SharedEngine
from flotilla.shared.config.rules.publication import KEY, publishes_adapters
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.models.hub import fetched, model_directory
from flotilla.shared.service.devices import decided_here
from flotilla.shared.sizes.starting import check_engine

log = logging.getLogger(__name__)


def reason_not_shared(spec: ExperimentSpec) -> str | None:
    """Return why an experiment needs an engine of its own; None where it may share one.

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
        return f"{spec.resources.turns} puts the engine to sleep"
    if spec.data.images is not None:
        return "data.images needs another forward"
    if spec.algorithm.router_replay == "R3":
        return "algorithm.router_replay R3 needs another forward"
    if spec.tracking.profiler.engine_versions:
        return "tracking.profiler.engine_versions records the whole engine"
    return None


def _dtype(spec: ExperimentSpec) -> str:
    return str(spec.model.dtype)


MOST_ALONE = 1024
"""Experiments of which it is kept that they cannot share; an older one tries once more."""


class SharedEngines:
    """Gives experiments with the same base and engine settings one process.

    Args:
        make: makes an engine of settings, not yet started.
    """

    def __init__(self, make: Callable[[EngineSettings], Adapting] = ProcessEngine) -> None:
        self._make = make
        self._bases: dict[EngineSettings, Base] = {}
        self._alone: dict[str, str] = {}
        """Experiments that turned out to need an engine of their own, and why."""

    async def engine_for(self, spec: ExperimentSpec, experiment_id: str) -> SharedEngine | None:
        """Make an experiment's part of an engine, not yet started; None where it gets an engine of its own.

        Raises:
            ModelError, Unavailable: there is no memory for its base; see ``check_engine``.
        """
        spec = decided_here(spec)
        why = self._alone.get(experiment_id) or reason_not_shared(spec)
        if why is not None:
            log.info("the engine is not shared", extra={"experiment": experiment_id, "why": why})
            return None
        assert isinstance(spec.rollout.engine, TorchEngineConfig)
        await fetched(spec.model)
        settings = embedded_settings(spec, spec.rollout.engine)
        if (base := self._bases.get(settings)) is None or base.is_over:
            await asyncio.to_thread(check_engine, spec, model_directory(spec.model))
        return SharedEngine(experiment_id, settings, self)

    def join(self, user: SharedEngine) -> Base:
        """Give the process that runs with the settings of a user, or a new one."""
        base = self._bases.get(user.settings)
        if base is None or base.is_over:
            base = self._bases[user.settings] = Base(user.settings, self._make(user.settings))
        base.users.add(user)
        log.info("engine is shared", extra={"experiment": user.experiment_id, "sharers": len(base.users)})
        return base

    async def leave(self, user: SharedEngine, base: Base) -> None:
        """Take a user away; without one the process ends."""
        base.users.discard(user)
        if base.users:
            return
        if self._bases.get(base.settings) is base:
            del self._bases[base.settings]
        await base.close()

    def cannot_share(self, user: SharedEngine, why: str) -> None:
        """Let its experiment have an engine of its own from the next start on."""
        self._alone[user.experiment_id] = why
        if len(self._alone) > MOST_ALONE:
            del self._alone[next(iter(self._alone))]
