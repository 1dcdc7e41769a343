"""Commands for a fleet's upkeep: backups, and the retention of old data."""

from typing import TYPE_CHECKING, Final

from flotilla.cli import parsing
from flotilla.cli.parsing import add_command, add_experiment, add_gateway, add_json
from flotilla.defaults import DEFAULT_DATA

if TYPE_CHECKING:
    from flotilla.cli.parsing import Commands

PRUNED: Final = {
    "run": "whole runs, with records and series,",
    "checkpoints": "checkpoints",
    "samples": "samples",
    "logs": "profiles, logs of engines and files of trackers",
}
"""Parts with an age limit of their own, and their description."""


def add_upkeep(commands: "Commands") -> None:
    """Add ``backup``, ``restore``, ``prune`` and ``costs``."""
    _add_backups(commands)
    _add_prune(commands)
    _add_costs(commands)


def _add_backups(commands: "Commands") -> None:
    text = (
        "Back up a fleet (database, data plane, files of its experiments) into a new FOLDER while it works. "
        "Without FLOTILLA_REDIS_URL and FLOTILLA_DATABASE_URL it uses those of the local fleet."
    )
    backup = add_command(commands, "backup", text, "backup:backup")
    backup.add_argument("folder", metavar="FOLDER", help="created by this command, readable only by you")
    backup.add_argument("--data", default=DEFAULT_DATA, help="data directory of the gateway (%(default)s)")
    text = "also the operator's token, for a fleet elsewhere: protect the folder accordingly"
    backup.add_argument("--token-file", action="store_true", help=text)
    text = "Restore a backup into empty stores, elsewhere or after a loss, and report what is lost."
    restore = add_command(commands, "restore", text, "backup:restore")
    restore.add_argument("folder", metavar="FOLDER", help="folder of the backup")
    restore.add_argument("--data", default=DEFAULT_DATA, help="data directory of the new fleet (%(default)s)")
    restore.add_argument(
        "--dry-run", action="store_true", help="only report what the backup holds, and what would be lost"
    )
    text = "also its tokens, and code files that its fleet might run: only for a backup that you made"
    restore.add_argument("--with-rights", action="store_true", help=text)


def _add_prune(commands: "Commands") -> None:
    text = "List data of finished experiments that exceeds an age or size; with --yes delete it."
    prune = add_command(commands, "prune", text, "prune:prune")
    for part, what in PRUNED.items():
        text = f"{what} of experiments that ended so many days ago"
        prune.add_argument(f"--{part}-days", type=parsing.amount, metavar="DAYS", help=text)
    text = "limit on the files of all finished experiments, such as 500GB: the oldest are deleted first"
    prune.add_argument("--max-size", type=parsing.size, metavar="SIZE", help=text)
    prune.add_argument("--yes", action="store_true", help="delete it (default: a dry run)")
    add_json(prune)
    add_gateway(prune)


def _add_costs(commands: "Commands") -> None:
    text = "Show an experiment's use of each pool of machines, the cost of a trained token, and the tokens saved."
    costs = add_command(commands, "costs", text, "costs:costs")
    add_experiment(costs)
    text = "YAML: currency, and hourly prices by pool and device (default: the gateway's list, else only hours)"
    costs.add_argument("--prices", metavar="FILE", help=text)
    add_json(costs)
    add_gateway(costs)
