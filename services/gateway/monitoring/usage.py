"""What an experiment took of each pool, from its events and series: nothing is counted a second time."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PointRecord
from flotilla.shared.config.rules.devices import rollout_need, trainer_need
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.costs import CPU, PoolUse, Usage
from flotilla.shared.schemas.experiment import Event, Origin
from flotilla.shared.schemas.service import ON_DEMAND, ServiceKind
from flotilla.shared.schemas.wire import TolerantWire

ASSIGNED, LEFT = "service_assigned", "service_left"
PAGE = 1000
SLICE = 20_000
HOUR = 3600.0
GENERATED, TRAINED, SAVED = "tokens/generated", "tokens/trained_in_step", "tokens/resumed_in_step"
OF_POOL = f"{TRAINED}/"


NEEDS = {ServiceKind.TRAINER: trainer_need, ServiceKind.ROLLOUT: rollout_need}
"""Of the kinds whose devices are given with them; what others see of a machine, the experiment does not take."""


def machine_of(service: LiveService, spec: ExperimentSpec) -> dict[str, Any]:
    """Say, for the event of its assignment, what an experiment takes with a service, of whose machines."""
    capabilities = service.capabilities
    need = NEEDS.get(service.kind)
    names = {}
    for each in capabilities.devices if need is not None and need(spec).is_used else ():
        identity = each.uuid or f"{capabilities.machine or service.record.host}/{each.label}"
        names[identity] = each.name or "gpu"
    found: dict[str, Any] = {} if capabilities.pool is None else {"pool": capabilities.pool}
    return found | ({"devices": names} if names else {})


class Assigned(TolerantWire):
    """What the events of a service's assignment and departure say of it; earlier releases do not say where it is."""

    service_id: str
    service_kind: str
    pool: str = ON_DEMAND
    devices: Mapping[str, str] = {}


@dataclass
class _Span:
    """A service's time with the experiment, in seconds since the epoch."""

    of: Assigned
    begin: float
    end: float


def uses_of(events: Iterable[Event], until: float) -> list[PoolUse]:
    """Add up what services took.

    Args:
        events: that services were assigned and left, in their order.
        until: when those that have not left are counted to, in seconds since the epoch.
    """
    spans: list[_Span] = []
    there: dict[str, _Span] = {}
    for each in events:
        at, facts = datetime.fromisoformat(each.at).timestamp(), Assigned.model_validate(each.data)
        if each.type == LEFT:
            if (left := there.pop(facts.service_id, None)) is not None:
                left.end = max(left.begin, at)
        elif facts.service_id not in there:
            there[facts.service_id] = _Span(facts, at, until)
            spans.append(there[facts.service_id])
    hours: dict[tuple[str, str, str], float] = defaultdict(float)
    by_device: dict[str, list[_Span]] = defaultdict(list)
    for span in spans:
        if not span.of.devices:
            hours[span.of.pool, span.of.service_kind, CPU] += max(0.0, span.end - span.begin) / HOUR
        for device in span.of.devices:
            by_device[device].append(span)
    for device, sharing in by_device.items():
        for span, seconds in _divided(sharing):
            hours[span.of.pool, span.of.service_kind, span.of.devices[device]] += seconds / HOUR
    return [
        PoolUse(pool=pool, kind=kind, device=device, hours=each) for (pool, kind, device), each in sorted(hours.items())
    ]


def _divided(spans: list[_Span]) -> Iterable[tuple[_Span, float]]:
    """Divide the time of a device among those that had it: at each moment equally."""
    moments = [(each.begin, False, number) for number, each in enumerate(spans)]
    moments += [(max(each.begin, each.end), True, number) for number, each in enumerate(spans)]
    # What each of those that are there has got since the first came.
    share, begun = 0.0, [0.0] * len(spans)
    num_there, before = 0, 0.0
    for moment, is_end, number in sorted(moments):
        if num_there:
            share += (moment - before) / num_there
        before = moment
        if is_end:
            num_there -= 1
            yield spans[number], share - begun[number]
        else:
            num_there += 1
            begun[number] = share


async def usage_of(store: Store, experiment: Experiment, now: float) -> Usage:
    """Add up what an experiment took so far, and the tokens that came of it."""
    record = experiment.record
    events: list[Event] = []
    after = 0
    while page := await store.events(record.id, after=after, limit=PAGE, types=("service_assigned", "service_left")):
        events += page
        after = page[-1].id
    names = await store.metric_names(record.id)
    by_pool = sorted(name for name in names if name.startswith(OF_POOL))
    found: dict[str, dict[int, PointRecord]] = defaultdict(dict)
    cursor = 0
    wanted = [GENERATED, TRAINED, SAVED, *by_pool]
    while rows := await store.metrics(record.id, names=wanted, after=cursor, limit=SLICE):
        for _, point in rows:
            found[point.name][point.step] = point
        cursor = rows[-1][0]
        await asyncio.sleep(0)
    # A step that is trained again replaces its points; those of pools that it no longer names stay behind.
    stored_at = {step: point.at for step, point in found[TRAINED].items()}
    sums = {
        name: sum(each.value for each in found[name].values() if each.at == stored_at.get(each.step)) for name in wanted
    }
    before = 0 if record.origin is None else Origin.model_validate(record.origin).generated_tokens
    generated = found[GENERATED][max(found[GENERATED])].value - before if found[GENERATED] else 0.0
    trained, saved = round(sums[TRAINED]), round(sums[SAVED])
    pools = {name.removeprefix(OF_POOL): round(sums[name]) for name in by_pool}
    unnamed = trained - saved - sum(pools.values())
    if unnamed > 0:  # of steps before any rollout named a pool
        pools[ON_DEMAND] = pools.get(ON_DEMAND, 0) + unnamed
    uses = await asyncio.to_thread(uses_of, events, now if experiment.is_active else record.updated_at)
    return Usage(
        experiment_id=record.id,
        uses=tuple(uses),
        generated_tokens=max(0, round(generated)),
        trained_tokens=trained,
        saved_tokens=saved,
        trained_by_pool=pools,
    )
