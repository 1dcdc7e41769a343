"""``flotilla prune``: what finished experiments left, and is kept no longer."""

import argparse

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, table_of, telling, write_json
from flotilla.cli.parsing import SIZE_UNITS
from flotilla.shared.schemas.retention import Part, PrunedPart, Pruning, Retention

COLUMNS = ("experiment", "what", "size", "ended", "why")


async def prune(arguments: argparse.Namespace) -> int:
    """Return what would go, or delete it.

    Raises:
        InvalidRequest: no retention time is set.
        Conflict: the gateway does that already.
    """
    days = {f"{part}_days": getattr(arguments, f"{part}_days") for part in Part}
    retention = Retention(**days, max_bytes=arguments.max_size)
    async with open_gateway(arguments) as client, telling("the gateway looks through what experiments left"):
        found = await client.prune(retention, dry_run=not arguments.yes)
    if arguments.json:
        write_json(found.model_dump(mode="json"))
    else:
        _show(found)
    return ExitCode.DONE


def _show(found: Pruning) -> None:
    console = new_console()
    for parts, title in ((found.removed, _title(found)), (found.kept, "kept although its time is over")):
        if parts:
            rows = [_row(each) for each in parts]
            console.print(table_of(COLUMNS, rows, whole=("experiment",), title=title))
    if not found.removed:
        console.print("nothing was deleted" if not found.dry_run else "nothing would be deleted")
    elif found.dry_run:
        console.print(f"a dry run: with --yes this is deleted, and frees {written_size(found.bytes)}")


def _title(found: Pruning) -> str:
    return "would be deleted" if found.dry_run else f"deleted, which freed {written_size(found.bytes)}"


def _row(each: PrunedPart) -> tuple[str, ...]:
    ended = each.ended_at[:16].replace("T", " ")
    return each.experiment_id, each.part.value, written_size(each.bytes), ended, each.why


def written_size(num_bytes: int) -> str:
    """Write a size as people read it, such as ``1.5 GB``."""
    unit = max(
        (name for name, size in SIZE_UNITS.items() if num_bytes >= size), key=SIZE_UNITS.__getitem__, default="B"
    )
    amount = num_bytes / SIZE_UNITS[unit]
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
