"""Which steps a policy version contains, as it was published: after a loss, numbers follow steps no more."""

from services.gateway.store.base import Store
from services.gateway.store.records import ExperimentRecord


async def step_of(store: Store, record: ExperimentRecord, version: int) -> int:
    """Find the optimiser steps that a version contains; 0 for the initial weights."""
    if version == record.policy_version:
        return record.published_step
    published = await store.publication(record.id, version)
    return 0 if published is None else published.step
