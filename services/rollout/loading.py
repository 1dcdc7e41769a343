"""An engine, what joins weight groups for it, and the tokenizer: all at once, since each takes seconds."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.rollout.engines.base import Engine, GroupMember
from flotilla.services.rollout.engines.opening import make_engine
from flotilla.services.rollout.engines.shared.engine import CannotShare
from flotilla.services.rollout.episodes.rendering import ChatRenderer
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.models.hub import fetched, model_directory
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.service.devices import decided_here
from flotilla.shared.sizes.starting import check_engine
from flotilla.shared.weights.group.endpoint_client import EndpointClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded; its owner ends it."""

    engine: Engine
    endpoint: EndpointClient
    renderer: ChatRenderer

    async def close(self) -> None:
        """End the engine and the endpoint."""
        await asyncio.gather(self.engine.close(), self.endpoint.close())


async def load(
    spec: ExperimentSpec, pythons: Mapping[str, Path], places: Places, host: str, shared: Engine | None = None
) -> Loaded:
    """Load them; what was started ends where one of them cannot be.

    Args:
        spec, pythons, places, host: as of ``make_engine``.
        shared: the experiment's part of an engine that others use, too; None: it gets one of its own.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded.
        InvalidSpec: the engine is not one that this service can start.
        Unavailable: the model is on the hub, which cannot be reached, or too little memory is available now.
    """
    await fetched(spec.model)
    if shared is not None:
        try:
            return await _loaded(spec, shared, host)
        except CannotShare as error:
            log.info("the engine is not shared", extra={"why": str(error)})
    await asyncio.to_thread(check_engine, decided_here(spec), model_directory(spec.model))
    return await _loaded(spec, make_engine(spec, pythons, places.networks, host, places.check_file), host)


async def _loaded(spec: ExperimentSpec, engine: Engine, host: str) -> Loaded:
    endpoint = EndpointClient(bind_host=host, device=spec.rollout.engine.device if spec.uses_nccl else None)
    is_member = isinstance(engine, GroupMember)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.start())
            if spec.asynchrony.publication.expects_broadcasts(host) and not is_member:
                tasks.create_task(endpoint.start())
            template = PromptTemplate.of(spec.data)
            loading = asyncio.to_thread(
                ChatRenderer.from_directory, str(model_directory(spec.model)), template, spec.data.images
            )
            rendering = tasks.create_task(loading)
    except BaseException as error:
        await asyncio.gather(engine.close(), endpoint.close())
        if isinstance(error, BaseExceptionGroup):
            # One cause is enough to tell: the others are its consequences.
            raise error.exceptions[0] from None
        raise
    return Loaded(engine, endpoint, rendering.result())
