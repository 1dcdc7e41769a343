"""Builds an experiment's graders as the reward service does at its start, to see whether they can be built here."""

import os
import time
from collections.abc import Mapping

from services.reward.verifiers.custom_process import CustomProcessVerifier
from services.reward.verifiers.registry import Surroundings, build_component
from shared.config.reward import Component
from shared.config.spec import ExperimentSpec
from shared.errors import FlotillaError, Scalar
from shared.settings import DEFAULT_GATEWAY
from shared.streams.memory.mailbox import MemoryMailbox


async def unbuildable(spec: ExperimentSpec, environment: Mapping[str, str] = os.environ) -> list[dict[str, Scalar]]:
    """Build every reward component and close it again; nothing is graded, and no grader is called.

    The code of a custom function's file is run, as on its import.

    Returns:
        One entry per component that cannot be built: path, value, what is allowed.
    """
    # A sandbox is found when an experiment starts: here it is enough that one could be named.
    surroundings = Surroundings(
        experiment="check",
        sandbox_url="http://sandbox.invalid",
        secrets=environment,
        mailbox=MemoryMailbox(time.monotonic),
        gateway_url=DEFAULT_GATEWAY,
    )
    entries: list[dict[str, Scalar]] = []
    for number, component in enumerate(spec.reward.components):
        try:
            await _built(component, surroundings)
        except FlotillaError as error:
            field = f"reward.components.{number}"
            entries.append({"path": field, "value": getattr(component, "path", None), "allowed": error.detail})
    return entries


async def _built(component: Component, surroundings: Surroundings) -> None:
    verifier = build_component(component, surroundings)
    try:
        if isinstance(verifier, CustomProcessVerifier):
            await verifier.start()
    finally:
        await verifier.aclose()
