"""``flotilla replay``: a trained step computed again where its files are, and a sample of it taken apart."""

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flotilla.cli.commands.show import experiment_directory
from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.gateway import open_gateway
from flotilla.cli.output import new_console, table_of, write_json
from flotilla.shared.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from flotilla.services.trainer.replay.replay import Replayed
    from flotilla.services.trainer.replay.tokens import TokenRow

SHOWN = (
    *("loss/total", "loss/policy", "loss/kl", "distillation/kl"),
    *("ratio/mean", "ratio/clip_fraction", "ratio/approx_kl", "entropy"),
)
"""Besides gradient norms and whatever differs."""


async def replay(arguments: argparse.Namespace) -> int:
    """Compute a step again and compare it with the record; 1 if it differs."""
    group, member = _sample_of(arguments.sample)
    directory = experiment_directory(arguments) or await directory_of(arguments, "replay it where its checkpoints are")
    try:
        from flotilla.services.trainer.replay.replay import replay as compute
        from flotilla.services.trainer.replay.tokens import take_apart
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"replaying needs {error.name}: pip install 'flotilla[torch]'") from None

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    found = await asyncio.to_thread(compute, directory, arguments.step, tell=tell)
    rows = [] if group is None else take_apart(found, group, member)
    if arguments.json:
        write_json(
            {
                "step": found.step,
                "version": found.version,
                "start": found.start,
                "is_equal": found.is_equal,
                "figures": [asdict(each) | {"difference": each.difference} for each in found.figures],
                "tokens": [asdict(row) for row in rows],
            }
        )
    else:
        _print(found, rows, directory)
    return ExitCode.DONE if found.is_equal else ExitCode.FAILED


def _sample_of(text: str | None) -> tuple[int | None, int]:
    if text is None:
        return None, 0
    group, dot, member = text.partition(".")
    if not group.isdigit() or not dot or not member.isdigit():
        raise InvalidRequest(
            f"--sample is a group and an answer of it, such as 487.1, got {text!r}: see `flotilla show`"
        )
    return int(group), int(member)


async def directory_of(arguments: argparse.Namespace, advice: str) -> Path:
    """Ask the gateway for the directory of the experiment that is meant.

    Raises:
        NotFound: it is not on this machine; the detail ends with the advice.
    """
    async with open_gateway(arguments) as client:
        view = await client.experiment(arguments.experiment)
    directory = Path(view.directory)
    if not await asyncio.to_thread(directory.is_dir):
        raise NotFound(f"{directory} of {view.id} is not on this machine: {advice}")
    return directory


def _print(found: "Replayed", rows: "list[TokenRow]", directory: Path) -> None:
    console = new_console()
    start = f"the checkpoint of step {found.start}" if found.start else "the model that training began with"
    console.print(f"{directory.name}: step {found.step} (version {found.version}) again, from {start}", markup=False)
    shown = [
        each for each in found.figures if each.name in SHOWN or each.name.startswith("grad_norm") or each.difference > 0
    ]
    cells = [[each.name, f"{each.recorded:.9g}", f"{each.now:.9g}", f"{each.difference:.1e}"] for each in shown]
    console.print(table_of(("figure", "recorded", "computed again", "difference"), cells))
    others = len(found.figures) - len(shown)
    verdict = "equal within 1e-06" if found.is_equal else "NOT equal within 1e-06: other software, threads or settings?"
    console.print(f"{verdict} ({others} more figures are the same to the last bit)", markup=False)
    if rows:
        console.print(_token_table(rows))


def _four_digits(value: float | None) -> str:
    """Write a figure; one that rounds to nothing has no sign."""
    return "-" if value is None else f"{value:.4f}" if abs(value) >= 5e-5 else "0.0000"


def _token_table(rows: "list[TokenRow]") -> Table:
    names = (
        "at",
        "token",
        "version",
        "lag",
        "log-prob sampled",
        "log-prob trained",
        "ratio",
        "advantage",
        "weight",
        "why",
    )
    table = Table(*names, title="sampled tokens; log-probabilities in nats", title_justify="left")
    for row in rows:
        colour = "dim" if not row.advantage else "green" if row.advantage > 0 else "red"
        numbers = (row.sampled, row.now, row.ratio, row.advantage, row.weight)
        cells = [str(row.position), repr(row.text), str(row.version), str(row.lag)]
        cells += [_four_digits(value) for value in numbers]
        table.add_row(*map(Text, cells), Text(row.why, style="yellow" if row.is_clipped else colour))
    return table
