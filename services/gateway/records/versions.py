"""Which steps a policy version contains, as it was published: after a loss, numbers follow steps no more."""

from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.records import ExperimentRecord


async def step_of(store: Store, record: ExperimentRecord, version: int) -> int:
    """Find the optimiser steps that a version contains; of the initial weights 0, or those of where it began."""
    if version == record.policy_version:
        return record.published_step
    published = await store.publication(record.id, version)
    if published is not None:
        return published.step
    origin = record.origin
    return origin["step"] if origin is not None and version == origin["version"] else 0
