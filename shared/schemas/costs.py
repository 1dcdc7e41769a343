"""What an experiment took of each pool of machines, what was made of it, and what that costs by a list of prices."""

from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.wire import TolerantWire, Wire

CPU = "cpu"
"""In place of a device's name, of a service without GPUs."""
MILLION = 1_000_000
MOST_PRICES = 1000


class PoolUse(TolerantWire):
    """What services of one kind, in one pool and with one kind of device, were there for."""

    pool: str
    kind: str
    """Of service."""
    device: str
    """Name of the GPU; ``cpu`` of services without one."""
    hours: float
    """Of all such devices together, of services without any of these; a device that two services share counts half for
    each."""


class PoolCost(TolerantWire):
    """What one pool costs, and what was trained of what its rollouts sampled."""

    pool: str
    hours: float
    cost: float
    sampling_cost: float
    """Of it, that of its rollouts."""
    trained_tokens: int
    """Sampled by its rollouts alone, and trained."""
    per_million: float | None
    """``sampling_cost`` for a million of them; null while there are none."""


class Costs(TolerantWire):
    """What an experiment costs so far."""

    currency: str
    pools: tuple[PoolCost, ...]
    cost: float
    per_million: float | None
    """Of all services, for a million trained tokens."""


class Usage(TolerantWire):
    """What an experiment took so far, and what was made of it."""

    experiment_id: str
    uses: tuple[PoolUse, ...]
    generated_tokens: int
    """Sampled, of all groups that reached the trainer."""
    trained_tokens: int
    saved_tokens: int
    """Of the trained ones, those that a departing rollout handed over: they were not sampled twice."""
    trained_by_pool: Mapping[str, int]
    """The others, by the pool of the rollout that sampled them."""
    costs: Costs | None = None
    """By the gateway's own list of prices; null where it has none, or ``costs_problem`` is said."""
    costs_problem: str | None = None
    """What its list has no price for."""


class Price(Wire):
    """What an hour costs, of which devices in which pools."""

    pool: str = "*"
    """A name, or a pattern such as ``spot-*``."""
    device: str = "*"
    """A name, a pattern such as ``*H100*``, or ``cpu`` for services without GPUs."""
    price: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Prices(Wire):
    """A list of prices; the first that fits holds."""

    currency: str = Field("", max_length=16)
    hourly: tuple[Price, ...] = Field(min_length=1, max_length=MOST_PRICES)

    def of(self, use: PoolUse) -> float:
        """Find the price of an hour.

        Raises:
            InvalidRequest: none fits.
        """
        for each in self.hourly:
            if fnmatchcase(use.pool, each.pool) and fnmatchcase(use.device, each.device):
                return each.price
        raise InvalidRequest(
            f"no price fits {use.device} in the pool {use.pool} ({use.kind}, {use.hours:.2f} hours): add a line such "
            f"as {{pool: {use.pool}, device: {use.device!r}, price: 0}}"
        )


def read_prices(path: Path) -> Prices:
    """Read a file of prices, in YAML.

    Raises:
        InvalidRequest: it cannot be read, or is none.
    """
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRequest(f"{path}: {where}: {first['msg']}; docs/elasticity.md has an example") from None
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError:
        raise InvalidRequest(f"{path} is no YAML") from None


def with_costs(usage: Usage, prices: Prices) -> Usage:
    """Add an experiment's costs so far by a list of prices, replacing those of another list.

    Raises:
        InvalidRequest: a pool or device has no price.
    """
    return usage.model_copy(update={"costs": priced(usage, prices), "costs_problem": None})


def priced(usage: Usage, prices: Prices) -> Costs:
    """Calculate what an experiment costs so far.

    Raises:
        InvalidRequest: a pool or device has no price.
    """
    hours: dict[str, float] = defaultdict(float)
    cost: dict[str, float] = defaultdict(float)
    sampling: dict[str, float] = defaultdict(float)
    for use in usage.uses:
        hours[use.pool] += use.hours
        cost[use.pool] += (paid := use.hours * prices.of(use))
        sampling[use.pool] += paid if use.kind == "rollout" else 0.0
    pools = [
        PoolCost(
            pool=pool,
            hours=hours[pool],
            cost=cost[pool],
            sampling_cost=sampling[pool],
            trained_tokens=(trained := usage.trained_by_pool.get(pool, 0)),
            per_million=sampling[pool] / trained * MILLION if trained else None,
        )
        for pool in sorted({*hours, *usage.trained_by_pool})
    ]
    total = sum(cost.values())
    per_million = total / usage.trained_tokens * MILLION if usage.trained_tokens else None
    return Costs(currency=prices.currency, pools=tuple(pools), cost=total, per_million=per_million)
