"""Weights & Biases as a tracker: a run with the experiment's id, which is resumed after a restart.

A record's cursor is the library's own step, which only grows and which the service returns with a run that is resumed:
so an online run continues right after what the service holds, and the library ignores what comes again. No service
knows how far an offline run came. Its cursor is a file beside it, written after each batch: a gateway that is killed
between the two writes that batch once more, into the next of the run's directories, with the same steps.
"""

from collections.abc import Sequence

from flotilla.services.gateway.tracking.base import Record, TrackedRun
from flotilla.shared.config.sections.tracking import WandbTrackerConfig

INIT_SECONDS = 60.0


class WandbTracker:
    """Logs each record with its training step as a value, so that a training step may come again."""

    def __init__(self, config: WandbTrackerConfig, run: TrackedRun) -> None:
        import wandb  # an optional package, imported where it is used

        folder = run.directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._place = folder / "cursor"
        self._cursor = int(self._place.read_text()) if self._place.exists() else 0
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            mode=config.mode,
            id=run.id,
            name=run.name,
            resume="allow",
            reinit="create_new",
            dir=str(run.directory),
            config=dict(run.spec),
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS, console="off", x_disable_stats=True, silent=True, disable_git=True
            ),
        )
        if config.mode == "online" and self._run.resumed:
            self._cursor = max(0, self._run.starting_step - 1)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def cursor(self) -> int:
        """Return the cursor that the service or, offline, the file has."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Hand the records to the library, which sends them in its own process."""
        for record in records:
            values = {**record.values, "step": record.step, "version": record.version}
            self._run.log(values, step=record.cursor, commit=True)
        self._cursor = records[-1].cursor
        fresh = self._place.with_suffix(".new")
        fresh.write_text(str(self._cursor))
        fresh.replace(self._place)

    def close(self) -> None:
        """Let the library send what it still has."""
        self._run.finish()
