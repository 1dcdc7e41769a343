"""The rows that an experiment works on, read when its work begins."""

import asyncio
import threading

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.overlong import without_overlong
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.records.repository import Experiment
from flotilla.shared.locations.allowed import Places


async def load(experiment: Experiment, places: Places, events: EventLog) -> tuple[Dataset | None, Dataset | None]:
    """Load training and held-out rows, without those that are too long; None for rows that it does not have.

    Raises:
        DataError: a dataset cannot be read (any more), or all its prompts are too long.
    """
    spec, stop = experiment.spec, threading.Event()
    has_rows = spec.trains and spec.data.subscribes_to is None
    dataset = await asyncio.to_thread(checks.train_dataset, spec, places) if has_rows else None
    held_out = await asyncio.to_thread(checks.evaluation_dataset, spec, places)
    found: list[Dataset | None] = []
    try:
        for what, each in (("training", dataset), ("held-out", held_out)):
            is_whole = each is dataset and spec.finished_job is not None
            if each is None or is_whole or spec.written_answers is not None:
                # The limit on whole answers is another, which each row meets when its turn comes.
                found.append(each)
            else:
                filtered = await asyncio.to_thread(without_overlong, each, spec, what, stop=stop)
                found.append(filtered.dataset)
                if filtered.num_dropped:
                    await events.append(
                        experiment.id,
                        "prompts_filtered",
                        dataset=what,
                        num_rows=filtered.num_rows,
                        num_dropped=filtered.num_dropped,
                    )
    finally:
        stop.set()
    return found[0], found[1]


async def load_with_loss(experiment: Experiment, places: Places) -> Dataset | None:
    """Load the rows whose loss is measured; None if the job names none.

    Raises:
        DataError, InvalidSpec: they cannot be read as the spec says.
    """
    return await asyncio.to_thread(checks.held_out_dataset, experiment.spec, places)
