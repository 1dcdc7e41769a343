"""The command line of what keeps a fleet in order: copies of what it knows, and an end to what is kept."""

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
"""What goes by its own age, and what that is."""


def add_upkeep(commands: "Commands") -> None:
    """Add ``backup``, ``restore``, ``prune`` and ``costs``."""
    _add_backups(commands)
    _add_prune(commands)
    _add_costs(commands)


def _add_backups(commands: "Commands") -> None:
    text = (
        "Copy what a fleet knows (database, data plane, files of its experiments) into a new FOLDER while it works. "
        "Where FLOTILLA_REDIS_URL and FLOTILLA_DATABASE_URL name no servers, those of the local fleet."
    )
    backup = add_command(commands, "backup", text, "backup:backup")
    backup.add_argument("folder", metavar="FOLDER", help="made by this command, readable for you alone")
    backup.add_argument("--data", default=DEFAULT_DATA, help="data directory of the gateway (%(default)s)")
    text = "also the operator's token, which a fleet elsewhere then has: keep the folder as you keep that"
    backup.add_argument("--token-file", action="store_true", help=text)
    text = "Put a backup into stores that are empty, elsewhere or after a loss, and say what is lost."
    restore = add_command(commands, "restore", text, "backup:restore")
    restore.add_argument("folder", metavar="FOLDER", help="of the backup")
    restore.add_argument("--data", default=DEFAULT_DATA, help="data directory of the fleet to come (%(default)s)")
    restore.add_argument(
        "--dry-run", action="store_true", help="only say what the backup holds, and what would be lost"
    )
    text = "also its tokens and the files of code that its fleet might run: only of a backup that is your own"
    restore.add_argument("--with-rights", action="store_true", help=text)


def _add_prune(commands: "Commands") -> None:
    text = "Say what finished experiments left and is kept no longer, by age or size; with --yes also delete it."
    prune = add_command(commands, "prune", text, "prune:prune")
    for part, what in PRUNED.items():
        text = f"{what} of experiments that ended so many days ago"
        prune.add_argument(f"--{part}-days", type=parsing.amount, metavar="DAYS", help=text)
    text = "what the files of all finished experiments may take, such as 500GB: those that ended first go first"
    prune.add_argument("--max-size", type=parsing.size, metavar="SIZE", help=text)
    prune.add_argument("--yes", action="store_true", help="delete it (default: a dry run)")
    add_json(prune)
    add_gateway(prune)


def _add_costs(commands: "Commands") -> None:
    text = "What an experiment took of each pool of machines, what a trained token costs, and which tokens were saved."
    costs = add_command(commands, "costs", text, "costs:costs")
    add_experiment(costs)
    text = "YAML: currency, and hourly prices by pool and device (default: the gateway's list, else hours alone)"
    costs.add_argument("--prices", metavar="FILE", help=text)
    add_json(costs)
    add_gateway(costs)
