"""``flotilla doctor --fleet``: whether the services of a fleet reach what they need, and what to do where not."""

import argparse

from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, table_of, write_json
from flotilla.shared.schemas.checks import FleetExamination


async def examine(arguments: argparse.Namespace) -> int:
    """Have the gateway examine its fleet; 1 if something failed."""
    async with open_gateway(arguments) as client:
        found = await client.examine()
    if arguments.json:
        write_json(found.model_dump(mode="json"))
    else:
        _show(found)
    return 0 if found.is_well else 1


def _show(found: FleetExamination) -> None:
    console = new_console()
    if found.findings:
        rows = [
            (each.host, each.service_id or "", each.verdict, each.topic, each.tried, each.found)
            for each in found.findings
        ]
        console.print(table_of(("host", "service", "verdict", "topic", "tried", "found"), rows, whole=("host",)))
        for advice in dict.fromkeys((each.host, each.topic, each.advice) for each in found.findings):
            console.print(f"{advice[0]}, {advice[1]}: {advice[2]}", markup=False)
    if found.num_more_findings:
        console.print(f"and {found.num_more_findings} more findings")
    skew = "" if found.largest_skew_seconds is None else f", clocks within {found.largest_skew_seconds:.1f} s"
    console.print(
        f"{found.num_services} services on {found.num_hosts} hosts, {found.num_asked} of them asked; "
        f"{found.num_pairs_tried} of {found.num_pairs} pairs of hosts tried{skew}; {found.seconds:.0f} s"
    )
    console.print("the fleet is healthy" if found.is_well else "the fleet is not healthy: fix what failed")
