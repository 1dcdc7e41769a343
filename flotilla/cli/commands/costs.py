"""``flotilla costs``: what an experiment took of each pool of machines, and what a trained token costs."""

import argparse
from pathlib import Path

from rich.table import Table

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, table_of, write_json
from flotilla.shared.schemas.costs import Costs, Usage, read_prices, with_costs


async def costs(arguments: argparse.Namespace) -> int:
    """Show an experiment's hours, tokens and costs.

    Raises:
        InvalidRequest: the prices that were given cannot be read, or have none for a pool or device that it used.
    """
    prices = None if arguments.prices is None else read_prices(Path(arguments.prices))
    async with open_gateway(arguments) as client:
        view = await client.experiment(arguments.experiment)
        usage = await client.usage(view.id)
    if prices is not None:
        usage = with_costs(usage, prices)
    if arguments.json:
        write_json(usage.model_dump(mode="json"))
        return ExitCode.DONE
    console = new_console()
    console.print(_uses(usage, f"{view.name} ({view.id})"))
    console.print(_pools(usage))
    for line in _totals(usage):
        console.print(line, markup=False, soft_wrap=True)
    return ExitCode.DONE


def _uses(usage: Usage, title: str) -> Table:
    rows = [(each.pool, each.kind, each.device, f"{each.hours:.2f}") for each in usage.uses]
    return table_of(("pool", "service", "device", "hours"), rows, whole=("pool",), title=title)


def _pools(usage: Usage) -> Table:
    found = usage.costs
    if found is None:
        rows = [(pool, f"{count:,}") for pool, count in sorted(usage.trained_by_pool.items())]
        return table_of(("pool", "trained tokens"), rows, whole=("pool",))
    columns = ("pool", "hours", "costs", "of it sampling", "trained tokens", "sampling a million")
    priced_rows = [
        (
            each.pool,
            f"{each.hours:.2f}",
            _money(each.cost, found),
            _money(each.sampling_cost, found),
            f"{each.trained_tokens:,}",
            "" if each.per_million is None else _money(each.per_million, found),
        )
        for each in found.pools
    ]
    return table_of(columns, priced_rows, whole=("pool",))


def _totals(usage: Usage) -> list[str]:
    share = usage.trained_tokens / usage.generated_tokens if usage.generated_tokens else 0.0
    told = f"{usage.trained_tokens:,} of {usage.generated_tokens:,} generated tokens were trained ({share:.0%})"
    saved = f"{usage.saved_tokens:,} of them had been handed over by rollouts that left, and were not sampled again"
    lines = [told, saved]
    if usage.costs is not None:
        total, a_million = _money(usage.costs.cost, usage.costs), usage.costs.per_million
        told = "" if a_million is None else f", {_money(a_million, usage.costs)} for a million trained tokens"
        lines.append(f"all services together cost {total}{told}")
    if usage.costs_problem is not None:
        lines.append(f"no costs by the gateway's own prices: {usage.costs_problem}; or give --prices FILE")
    return lines


def _money(amount: float, found: Costs) -> str:
    digits = 2 if amount >= 1 or amount == 0 else 4
    return f"{amount:,.{digits}f} {found.currency}".rstrip()
